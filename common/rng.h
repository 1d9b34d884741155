/*
 * Counter-based random numbers: a value is a pure function of (key, counter), so
 * nothing has to be saved for a resume and any order of evaluation gives the same
 * numbers. The function is SplitMix64's finaliser applied twice (Steele et al. 2014).
 * Kernels use the same one, so a device may generate noise itself.
 */
#ifndef COMMON_RNG_H
#define COMMON_RNG_H

#include <stdint.h>

static inline uint64_t rng_mix(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Derives an independent key from a key and a number (a purpose, a step, a sample id). */
static inline uint64_t rng_key(uint64_t key, uint64_t n)
{
    return rng_mix(rng_mix(key) ^ n);
}

/* The i-th 64-bit value under key. */
static inline uint64_t rng_u64(uint64_t key, uint64_t i)
{
    return rng_mix(rng_mix(key + i * 0xd1342543de82ef95u));
}

/* Uniform in [0, 1): 53 and 24 bits. */
static inline double rng_unit(uint64_t key, uint64_t i)
{
    return (double)(rng_u64(key, i) >> 11) * 0x1p-53;
}
static inline float rng_unitf(uint64_t key, uint64_t i)
{
    return (float)(rng_u64(key, i) >> 40) * 0x1p-24f;
}

/* Standard normal (Box–Muller), the i-th under key. */
double rng_normal(uint64_t key, uint64_t i);

#endif
