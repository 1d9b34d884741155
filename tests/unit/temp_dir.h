/*
 * A directory of a test's own. TMPDIR says where (else /tmp); nothing is written elsewhere.
 */
#ifndef TESTS_UNIT_TEMP_DIR_H
#define TESTS_UNIT_TEMP_DIR_H

/* Makes an empty one; its absolute path, without symbolic links. Fails the test where it cannot. */
char *temp_dir_make(void);
/* In memory where that is possible: for what is synced all the time and small. */
char *temp_dir_make_in_memory(void);
/* Removes it with all that is in it, frees the path and sets it to NULL. */
void temp_dir_remove(char **dir);

#endif
