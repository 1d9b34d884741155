/* What log_line() writes: one line, with values that end where they seem to end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "common/log.h"

static int file, stderr_copy;

static int set_up(void **state)
{
    (void)state;
    FILE *f = tmpfile();
    assert_non_null(f);
    file = fileno(f);
    stderr_copy = dup(STDERR_FILENO);
    log_init("test", 3);
    return 0;
}

/* What was written since the last call, behind "daemon=test rank=3 ". */
static const char *written(void)
{
    static char text[4096];
    ssize_t n = pread(file, text, sizeof text - 1, 0);
    assert_true(n > 0);
    text[n] = 0;
    assert_int_equal(ftruncate(file, 0), 0);
    assert_int_equal(lseek(file, 0, SEEK_SET), 0);
    assert_int_equal(strncmp(text, "ts=", 3), 0);
    const char *at = strstr(text, " level=warn daemon=test rank=3 ");
    assert_non_null(at);
    return at + strlen(" level=warn daemon=test rank=3 ");
}

#define EXPECT(want, ...)                                                                          \
    do {                                                                                           \
        dup2(file, STDERR_FILENO);                                                                 \
        log_warn(__VA_ARGS__);                                                                     \
        dup2(stderr_copy, STDERR_FILENO);                                                          \
        assert_string_equal(written(), want);                                                      \
    } while (0)

static void test_values(void **state)
{
    (void)state;
    EXPECT("msg=\"plain\"\n", "plain", NULL);
    EXPECT("msg=\"a \\\"b\\\"\"\n", "a \"b\"", NULL);
    EXPECT("msg=\"m\" why=\"key \\\"x\\\" in C:\\\\y  level=error\" n=1\n", "m", "why=\"%s\" n=%d",
        "key \"x\" in C:\\y\n level=error", 1);
    EXPECT("msg=\"m\" i=-1 u=4294967295 l=-5 ll=-6 ull=18446744073709551615 z=7\n", "m",
        "i=%d u=%u l=%ld ll=%lld ull=%llu z=%zu", -1, 4294967295u, -5L, -6LL, UINT64_MAX + 0ULL,
        (size_t)7);
    EXPECT("msg=\"m\" f=1.5 g=0.25 x=00ff pct=% s=ab\n", "m", "f=%.1f g=%g x=%04x pct=%% s=%.2s",
        1.5, 0.25, 255u, "abc");
}

/* Longer than a line: cut off, and still one line. */
static void test_long(void **state)
{
    (void)state;
    char text[5000];
    memset(text, '"', sizeof text - 1);
    text[sizeof text - 1] = 0;
    dup2(file, STDERR_FILENO);
    log_warn("m", "why=\"%s\" n=%d", text, 1);
    dup2(stderr_copy, STDERR_FILENO);
    const char *line = written();
    assert_true(strlen(line) > 1900 && strlen(line) < 2048);
    assert_ptr_equal(strchr(line, '\n'), line + strlen(line) - 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_long),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
