/* What the files offer each other. */
#ifndef DEEPINFER_KERNELS_H
#define DEEPINFER_KERNELS_H

#include "common.h"

/* Work on items [first, last); worker is 0 for the caller and less than `threads` for the others. */
typedef void (*Range)(void *context, int64_t first, int64_t last, int worker);

/* run for all of [0, items), cut into `pieces` contiguous ranges, in any order and on up to `threads` threads. */
void deepinfer_parallel(int64_t items, int64_t pieces, Range run, void *context, int threads);

/* Ranges for each thread's share: a thread that comes late leaves its work to the others. */
enum { PIECES_PER_THREAD = 4 };

void deepinfer_rms_norm(const float *x, int64_t x_stride, const float *residual, int64_t residual_stride, const float *weight, float *y,
                        float *total, int64_t rows, int64_t width, float eps, int threads);
void deepinfer_rope(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const int32_t *pos, const float *cos_sin,
                    float *q_out, float *k_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int threads);
void deepinfer_silu_mul(const float *x, int64_t x_stride, float *y, int64_t rows, int64_t width, int threads);
void deepinfer_cache_write(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *k_pool, void *v_pool, int type,
                           const int32_t *page_table, int64_t table_stride, const int32_t *slot_ids, const int32_t *row_of,
                           const int32_t *pos, int64_t tokens, int64_t page_tokens, int64_t width, int threads);
int deepinfer_attention(const float *q, int64_t q_stride, const void *k_pool, const void *v_pool, int type, const int32_t *page_table,
                        int64_t table_stride, const int32_t *slot_ids, const int32_t *cu_q, const int32_t *pos, float *out, int64_t tokens,
                        int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_tokens, float scale, int threads);
void deepinfer_linear_float(const float *x, int64_t x_stride, const void *w, int type, const float *bias, float *y, int64_t rows, int64_t n,
                            int64_t k, int threads);
int deepinfer_linear_quant(const float *x, int64_t x_stride, const uint8_t *quants, const void *scales, int format, const float *bias,
                           float *y, int64_t rows, int64_t n, int64_t k, int threads);

#endif
