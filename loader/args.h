/*
 * Numbers on a command line, for the mains of this folder. Each returns 0, or -1 when the text is
 * not such a number in [lo, hi].
 */
#ifndef LOADER_ARGS_H
#define LOADER_ARGS_H

#include <stdint.h>

int arg_u64(const char *text, uint64_t lo, uint64_t hi, uint64_t *out);
int arg_double(const char *text, double lo, double hi, double *out);

#endif
