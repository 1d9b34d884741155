/*
 * What the tests of the operations share: a device, random arrays, comparisons, and the gradient of
 * a float64 function by central differences. A failing comparison ends the test and says where.
 */
#ifndef TESTS_UNIT_OPS_CHECK_H
#define TESTS_UNIT_OPS_CHECK_H

#include <stddef.h>
#include <stdint.h>

#include "kernels/device.h"

/* A CPU device with the given number of threads, made once a number and kept. */
struct device *test_device(int threads);

/* n floats, uniform in [-scale, scale), from the key; freed by the caller, as all that follow. */
float *random_floats(size_t n, float scale, uint64_t key);
float *filled_floats(size_t n, float value);
float *copied_floats(const float *x, size_t n);
double *as_doubles(const float *x, size_t n);

/* |got − want| ≤ tol · max(1, max |want|) everywhere; a NaN in got fails. */
void assert_near(const char *what, const float *got, const double *want, size_t n, double tol);
void assert_same_bits(const char *what, const float *a, const float *b, size_t n);

/* grad[i] = (f(x + step·e_i) − f(x − step·e_i)) / 2 step; x is restored. */
void central_differences(
    double (*f)(void *ctx), void *ctx, double *x, size_t n, double step, double *grad);

/*
 * first (B, T) for rows of several documents: the starts of row b are drawn from the key, about
 * one in `doc_tokens` tokens; doc_tokens 0: one document a row.
 */
int32_t *random_first(int batch, int seq, int doc_tokens, uint64_t key);

#endif
