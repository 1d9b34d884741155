#include "tests/unit/temp_dir.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka wants the four above first */
#include <cmocka.h>

#include <stdlib.h>
#include <unistd.h>

#include "common/fs.h"
#include "common/mem.h"

static char *make_under(const char *usual)
{
    const char *tmp = getenv("TMPDIR");
    char *made = mem_printf("%s/fullband-test-XXXXXX", tmp ? tmp : usual);
    assert_non_null(mkdtemp(made));
    char *dir = realpath(made, NULL);
    assert_non_null(dir);
    free(made);
    return dir;
}

char *temp_dir_make(void)
{
    return make_under("/tmp");
}

char *temp_dir_make_in_memory(void)
{
    return make_under(access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp");
}

void temp_dir_remove(char **dir)
{
    if (*dir)
        assert_int_equal(fs_remove_tree(*dir, NULL), 0);
    free(*dir);
    *dir = NULL;
}
