/* Numbers of a command line: what is taken, what is refused, and that a refusal changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/args.h"

static void test_whole_numbers(void **state)
{
    static const struct {
        const char *text;
        uint64_t lo, hi, want;
        const char *error;
    } cases[] = {
        {"0", 0, 9, 0, NULL},
        {"9", 0, 9, 9, NULL},
        {"18446744073709551615", 0, UINT64_MAX, UINT64_MAX, NULL},
        {"10", 0, 9, 0, "10: a whole number from 0 to 9 expected"},
        {"1", 2, 9, 0, "1: a whole number from 2 to 9 expected"},
        {"18446744073709551616", 0, UINT64_MAX, 0,
            "18446744073709551616: a whole number from 0 to 18446744073709551615 expected"},
        {"", 0, 9, 0, ": a whole number from 0 to 9 expected"},
        {"-1", 0, 9, 0, "-1: a whole number from 0 to 9 expected"},
        {" 1", 0, 9, 0, " 1: a whole number from 0 to 9 expected"},
        {"1x", 0, 9, 0, "1x: a whole number from 0 to 9 expected"},
    };
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct err e = {0};
        uint64_t out = 77;
        int rc = arg_u64(cases[i].text, cases[i].lo, cases[i].hi, &out, &e);
        assert_int_equal(rc, cases[i].error ? ERR_INPUT : 0);
        assert_int_equal(out, cases[i].error ? 77 : cases[i].want);
        assert_string_equal(e.msg, cases[i].error ? cases[i].error : "");
    }
    int small = 77;
    assert_int_equal(arg_int("256", 1, 256, &small, NULL), 0);
    assert_int_equal(small, 256);
    assert_int_equal(arg_int("4294967297", 1, 256, &small, NULL), ERR_INPUT);
    assert_int_equal(small, 256);
}

static void test_reals(void **state)
{
    static const char *const bad[] = {"", "x", "0.5x", "nan", "inf", "-0.1", "1.1", "1e999"};
    struct err e = {0};
    double out = 7;
    (void)state;
    assert_int_equal(arg_double("0.25", 0, 1, &out, &e), 0);
    assert_true(out == 0.25);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        assert_int_equal(arg_double(bad[i], 0, 1, &out, &e), ERR_INPUT);
        assert_true(out == 0.25);
    }
    assert_string_equal(e.msg, "1e999: a number from 0 to 1 expected");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_numbers), cmocka_unit_test(test_reals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
