/* What reads files, against what is not a file; and errors that stay one line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/fs.h"
#include "common/hash.h"
#include "common/safetensors.h"
#include "tests/unit/temp_dir.h"

static int make_dir(void **state)
{
    *state = temp_dir_make();
    return 0;
}

static int remove_dir(void **state)
{
    char *dir = *state;
    temp_dir_remove(&dir);
    return 0;
}

static int read_whole(const char *path, struct err *e)
{
    struct buf b = BUF_INIT;
    int rc = fs_read(path, 1 << 20, &b, e);
    buf_release(&b);
    return rc;
}

static int read_hash(const char *path, struct err *e)
{
    char hash[SHA256_HEX];
    return hash_sha256_file(path, hash, NULL, e);
}

static int read_tensors(const char *path, struct err *e)
{
    struct safetensors *st;
    int rc = safetensors_open(path, &st, e);
    safetensors_close(&st);
    return rc;
}

/* A FIFO without a writer would be waited for, for ever. */
static void test_not_a_file(void **state)
{
    static int (*const readers[])(const char *, struct err *) = {
        read_whole, read_hash, read_tensors};
    char *fifo = mem_printf("%s/fifo", (char *)*state),
         *loop = mem_printf("%s/loop", (char *)*state);
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_int_equal(symlink("loop", loop), 0);
    const char *const paths[] = {fifo, loop, *state, "/dev/null"};
    for (size_t i = 0; i < sizeof readers / sizeof *readers; i++)
        for (size_t k = 0; k < sizeof paths / sizeof *paths; k++) {
            struct err e = {0};
            assert_true(readers[i](paths[k], &e) < 0);
            assert_non_null(strstr(e.msg, paths[k]));
        }
    free(fifo);
    free(loop);
}

static void test_one_line(void **state)
{
    struct err e = {0};
    (void)state;
    err_set(&e, ERR_INPUT, "%s", "a\nb\rc\x1b[2Jd\te\x7f é");
    assert_string_equal(e.msg, "a b c [2Jd e  é");
    err_prefix(&e, "%s", "x\x07y");
    assert_string_equal(e.msg, "x y: a b c [2Jd e  é");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_not_a_file, make_dir, remove_dir),
        cmocka_unit_test(test_one_line),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
