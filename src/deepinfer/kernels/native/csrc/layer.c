/* A whole decoder layer in one call: the kernels of the other files, one after the other.
 *
 * Bit for bit what the ops give one by one; it saves their cost on the Python side, which at one token a step is
 * as much as the arithmetic.
 */
#include "kernels.h"

/* A packed weight; `scales` is NULL for float weights, whose `format` is then an element type. */
typedef struct {
    const void *codes, *scales;
    const float *bias;
    int64_t n, k;
    int format;
} Weight;

/* In step with layer.py. */
typedef struct {
    Weight qkv, out, gate_up, down;
    const float *attention_norm, *mlp_norm, *cos_sin;
    int64_t heads, kv_heads, dim;
    float eps, scale;
} Layer;

static int apply(const Weight *w, const float *x, float *y, int64_t rows, int threads) {
    if (w->scales) return deepinfer_linear_quant(x, w->k, w->codes, w->scales, w->format, w->bias, y, rows, w->n, w->k, threads);
    deepinfer_linear_float(x, w->k, w->codes, w->format, w->bias, y, rows, w->n, w->k, threads);
    return 0;
}

/* Floats of `work` that a layer needs for each token: total, normed, qkv, turned q and k, mixed, gate and up, product. */
EXPORT int64_t deepinfer_layer_work(const Layer *l) {
    return 2 * l->qkv.k + l->qkv.n + (2 * l->heads + l->kv_heads) * l->dim + l->out.n + l->gate_up.n + l->down.k;
}

/* x, residual (or NULL) [tokens, M] -> y (output of the MLP) and total (residual behind attention), [tokens, M].
 * work: deepinfer_layer_work floats for each token. Returns nonzero when there was no memory. */
EXPORT int deepinfer_layer(const Layer *l, const float *x, const float *residual, float *y, float *total, float *work, void *k_pool,
                           void *v_pool, int type, const int32_t *page_table, int64_t table_stride, const int32_t *slot_ids,
                           const int32_t *cu_q, const int32_t *row_of, const int32_t *pos, int64_t tokens, int64_t rows,
                           int64_t page_tokens, int threads) {
    const int64_t hidden = l->qkv.k, dim = l->dim, q_width = l->heads * dim, kv_width = l->kv_heads * dim;
    float *sum = work, *normed = sum + tokens * hidden, *qkv = normed + tokens * hidden, *q = qkv + tokens * l->qkv.n;
    float *k = q + tokens * q_width, *mixed = k + tokens * kv_width, *out = mixed + tokens * q_width;
    float *gate_up = out + tokens * hidden, *product = gate_up + tokens * l->gate_up.n;

    deepinfer_rms_norm(x, hidden, residual, hidden, l->attention_norm, normed, residual ? sum : NULL, tokens, hidden, l->eps, threads);
    if (apply(&l->qkv, normed, qkv, tokens, threads)) return 1;
    deepinfer_rope(qkv, l->qkv.n, qkv + q_width, l->qkv.n, pos, l->cos_sin, q, k, tokens, l->heads, l->kv_heads, dim, threads);
    deepinfer_cache_write(k, kv_width, qkv + q_width + kv_width, l->qkv.n, k_pool, v_pool, type, page_table, table_stride, slot_ids, row_of,
                          pos, tokens, page_tokens, kv_width, threads);
    if (deepinfer_attention(q, q_width, k_pool, v_pool, type, page_table, table_stride, slot_ids, cu_q, pos, mixed, tokens, rows, l->heads,
                            l->kv_heads, dim, page_tokens, l->scale, threads))
        return 1;
    if (apply(&l->out, mixed, out, tokens, threads)) return 1;
    deepinfer_rms_norm(out, hidden, residual ? sum : x, hidden, l->mlp_norm, normed, total, tokens, hidden, l->eps, threads);
    if (apply(&l->gate_up, normed, gate_up, tokens, threads)) return 1;
    deepinfer_silu_mul(gate_up, l->gate_up.n, product, tokens, l->down.k, threads);
    return apply(&l->down, product, y, tokens, threads);
}
