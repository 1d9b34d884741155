/*
 * Vectors of floats as wide as the target has them, for sources that are compiled once for AVX-512
 * and once for AVX2. Include after the target is set; a header of macros, so that it fits any.
 */
#ifndef KERNELS_CPU_SIMD_H
#define KERNELS_CPU_SIMD_H

#include <immintrin.h>
#include <stdint.h>

#ifdef __AVX512F__
typedef __m512 vec;
#define VL         16 /* floats a vector */
#define VEC_FMA    _mm512_fmadd_ps
#define VEC_MAX    _mm512_max_ps /* the second where either is NaN */
#define VEC_MIN    _mm512_min_ps
#define VEC_SET(x) _mm512_set1_ps(x)
#else
typedef __m256 vec;
#define VL         8
#define VEC_FMA    _mm256_fmadd_ps
#define VEC_MAX    _mm256_max_ps
#define VEC_MIN    _mm256_min_ps
#define VEC_SET(x) _mm256_set1_ps(x)
#endif

typedef int32_t ivec __attribute__((vector_size(4 * VL)));
/* In memory, at any float. */
typedef float vec_at __attribute__((vector_size(4 * VL), aligned(4), may_alias));
#define VEC_LOAD(p)     ((vec)(*(const vec_at *)(p)))
#define VEC_STORE(p, x) (*(vec_at *)(p) = (x))
/* x where the lane of m is −1, y where it is 0 */
#define VEC_PICK(m, x, y) ((vec)(((m) & (ivec)(x)) | (~(m) & (ivec)(y))))

#endif
