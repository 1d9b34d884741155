/*
 * Numbers on a command line. Each returns 0, or ERR_INPUT ("300: a whole number from 1 to 256
 * expected") when the text is not such a number in [lo, hi]; then *out is as it was.
 */
#ifndef COMMON_ARGS_H
#define COMMON_ARGS_H

#include <stdint.h>

#include "common/err.h"

int arg_u64(const char *text, uint64_t lo, uint64_t hi, uint64_t *out, struct err *e);
int arg_int(const char *text, int lo, int hi, int *out, struct err *e); /* 0 ≤ lo */
int arg_double(const char *text, double lo, double hi, double *out, struct err *e);

#endif
