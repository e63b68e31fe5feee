/* Shared by every kernel of the native CPU backend.
 *
 * All kernels are written for AVX2 + FMA + F16C and obey one rule: the sequence of float operations that makes an
 * output element depends on that element's own row and on the widths, never on how many rows come along, on the
 * tile a row falls into or on the number of threads. Multiplications and additions are fused only where an fmadd
 * intrinsic says so (the build sets -ffp-contract=off): otherwise the compiler could fuse one copy of a kernel
 * and not another.
 */
#ifndef DEEPINFER_COMMON_H
#define DEEPINFER_COMMON_H

#if !defined(__x86_64__)
#error "the native backend is written for x86-64 with AVX2, FMA and F16C"
#endif

#pragma GCC target("avx2,fma,f16c")

#include <immintrin.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

/* Element types of tensors handed in from Python; keep in step with lib.py. */
enum { TYPE_F32 = 0, TYPE_F16 = 1, TYPE_BF16 = 2 };

INLINE int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

INLINE size_t type_size(int type) { return type == TYPE_F32 ? 4 : 2; }

/* Products below which a linear layer runs on one thread: waking a second one costs about what it would save. */
#define SERIAL_PRODUCTS 150000

/* 64-byte aligned memory, so that a vector never straddles a cache line; NULL when there is none. */
INLINE void *aligned_scratch(size_t bytes) { return aligned_alloc(64, (bytes + 63) & ~(size_t)63); }

INLINE __m256 load_bf16(const uint16_t *p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

INLINE __m256 load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }

INLINE __m256 load_as_f32(const void *base, int64_t index, int type) {
    if (type == TYPE_F32) return _mm256_loadu_ps((const float *)base + index);
    if (type == TYPE_F16) return load_f16((const uint16_t *)base + index);
    return load_bf16((const uint16_t *)base + index);
}

/* Sum of the eight lanes, always in the same tree. */
INLINE float sum_lanes(__m256 v) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

INLINE float max_lanes(__m256 v) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

/* 2^x for x <= 127, relative error below 3e-7; 0 below -125, NaN stays NaN.
 * x = n + f with f in [-0.5, 0.5]; 2^f is the Taylor series of e^(f ln 2) up to degree 6 (its remainder,
 * (0.5 ln 2)^7 / 5040, is 1.2e-7). max(a, b) gives b when either is NaN, hence the order of its arguments. */
INLINE __m256 exp2_ps(__m256 x) {
    const __m256 low = _mm256_set1_ps(-125.0f);
    const __m256 alive = _mm256_cmp_ps(x, low, _CMP_NLT_UQ);
    x = _mm256_max_ps(low, x);
    const __m256 n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m256 f = _mm256_sub_ps(x, n);
    __m256 p = _mm256_set1_ps(1.5403530e-4f);
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.3333558e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(9.6181291e-3f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(5.5504109e-2f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(2.4022651e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(6.9314718e-1f));
    p = _mm256_fmadd_ps(p, f, _mm256_set1_ps(1.0f));
    const __m256i power = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
    const __m256 y = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), power));
    return _mm256_and_ps(y, alive);
}

#endif
