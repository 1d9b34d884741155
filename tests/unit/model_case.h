/* Small models and batches with fixed seeds, for the model's and the decoder's tests. */
#ifndef TESTS_MODEL_CASE_H
#define TESTS_MODEL_CASE_H

#include "kernels/model.h"

/* A valid model of 2 layers, D 8, V 13, GQA 4/2, feedback, all norms, doc_mask. */
struct model_config small_config(void);

/* A model on d with weights of a seed large enough that every part matters; *flat gets a host copy
 * (to free). */
struct model *small_model(struct device *d, const struct model_config *c,
    const struct model_limits *lim, uint64_t seed, float **flat);

/* A batch of documents with prefix masks; owns its arrays. */
struct test_batch {
    struct model_batch b;
    int32_t *tokens, *targets;
    uint8_t *doc_starts, *masks;
    uint64_t *keys;
};
/* fused: 0 prefix masks, 1 everything but document starts. jitter as in model_batch. */
void test_batch_make(struct test_batch *t, const struct model_config *c, int batch, int seq,
    int passes, int fused, float jitter, uint64_t seed);
void test_batch_release(struct test_batch *t);

/* ‖a − b‖ / ‖b‖ */
double relative_error_f(const float *a, const float *b, size_t n);
double relative_error_d(const float *a, const double *b, size_t n);

#endif
