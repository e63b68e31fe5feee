/* Norm, rotary positions, gated activation and cache writes: one pass over each row, memory bound.
 *
 * Rows are split among threads only when there is enough work to pay for waking them (a few us).
 */
#include "kernels.h"

enum { PARALLEL_ELEMENTS = 8192 };

static void over_rows(int64_t rows, int64_t elements, Range run, void *context, int threads) {
    if (elements < PARALLEL_ELEMENTS) threads = 1;
    deepinfer_parallel(rows, threads * PIECES_PER_THREAD, run, context, threads);
}

INLINE __m256i first_lanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

/* Sum of squares of a row: four chains over columns, so the order depends on the width alone. */
static float sum_of_squares(const float *h, int64_t width) {
    __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    int64_t i = 0;
    for (; i + 32 <= width; i += 32)
        for (int j = 0; j < 4; j++) {
            const __m256 v = _mm256_loadu_ps(h + i + 8 * j);
            acc[j] = _mm256_fmadd_ps(v, v, acc[j]);
        }
    for (; i < width; i += 8) {
        const __m256 v = _mm256_maskload_ps(h + i, first_lanes(width - i));
        acc[0] = _mm256_fmadd_ps(v, v, acc[0]);
    }
    return sum_lanes(_mm256_add_ps(_mm256_add_ps(acc[0], acc[1]), _mm256_add_ps(acc[2], acc[3])));
}

/* restrict: nothing overlaps, so the compiler may use whole vectors; it cannot fuse or reorder (see common.h). */
static void add_row(const float *restrict x, const float *restrict residual, float *restrict total, int64_t width) {
    for (int64_t i = 0; i < width; i++) total[i] = x[i] + residual[i];
}

static void scale_row(const float *restrict h, const float *restrict weight, float scale, float *restrict y, int64_t width) {
    for (int64_t i = 0; i < width; i++) y[i] = h[i] * scale * weight[i];
}

static void norm_row(const float *x, const float *residual, const float *weight, float *y, float *total, int64_t width, float eps) {
    if (residual) add_row(x, residual, total, width);
    const float *h = residual ? total : x;
    scale_row(h, weight, 1.0f / sqrtf(sum_of_squares(h, width) / (float)width + eps), y, width);
}

typedef struct {
    const float *x, *residual, *weight;
    float *y, *total;
    int64_t x_stride, residual_stride, width;
    float eps;
} Norm;

static void norm_rows(void *context, int64_t first, int64_t last, int worker) {
    const Norm *n = context;
    for (int64_t r = first; r < last; r++)
        norm_row(n->x + r * n->x_stride, n->residual ? n->residual + r * n->residual_stride : NULL, n->weight, n->y + r * n->width,
                 n->total ? n->total + r * n->width : NULL, n->width, n->eps);
}

/* y [rows, width] = norm(x + residual) * weight and total = x + residual; residual and total NULL: of x itself. */
EXPORT void deepinfer_rms_norm(const float *x, int64_t x_stride, const float *residual, int64_t residual_stride, const float *weight,
                               float *y, float *total, int64_t rows, int64_t width, float eps, int threads) {
    Norm n = {x, residual, weight, y, total, x_stride, residual_stride, width, eps};
    over_rows(rows, rows * width, norm_rows, &n, threads);
}

/* Masked stores are microcoded on some CPUs (tens of cycles), so only the last, partial vector uses them. */
static void rotate(const float *x, const float *cos, const float *sin, float *y, int64_t half) {
    int64_t i = 0;
    for (; i + 8 <= half; i += 8) {
        const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
        const __m256 low = _mm256_loadu_ps(x + i), high = _mm256_loadu_ps(x + half + i);
        _mm256_storeu_ps(y + i, _mm256_fmsub_ps(low, c, _mm256_mul_ps(high, s)));
        _mm256_storeu_ps(y + half + i, _mm256_fmadd_ps(high, c, _mm256_mul_ps(low, s)));
    }
    if (i == half) return;
    const __m256i lanes = first_lanes(half - i);
    const __m256 c = _mm256_maskload_ps(cos + i, lanes), s = _mm256_maskload_ps(sin + i, lanes);
    const __m256 low = _mm256_maskload_ps(x + i, lanes), high = _mm256_maskload_ps(x + half + i, lanes);
    _mm256_maskstore_ps(y + i, lanes, _mm256_fmsub_ps(low, c, _mm256_mul_ps(high, s)));
    _mm256_maskstore_ps(y + half + i, lanes, _mm256_fmadd_ps(high, c, _mm256_mul_ps(low, s)));
}

static void rotate_token(const float *x, const float *line, float *y, int64_t heads, int64_t width) {
    for (int64_t h = 0; h < heads; h++) rotate(x + h * width, line, line + width / 2, y + h * width, width / 2);
}

typedef struct {
    const float *q, *k, *cos_sin;
    const int32_t *pos;
    float *q_out, *k_out;
    int64_t q_stride, k_stride, heads, kv_heads, width;
} Rope;

static void rotate_rows(void *context, int64_t first, int64_t last, int worker) {
    const Rope *r = context;
    for (int64_t t = first; t < last; t++) {
        const float *line = r->cos_sin + r->pos[t] * r->width;
        rotate_token(r->q + t * r->q_stride, line, r->q_out + t * r->heads * r->width, r->heads, r->width);
        rotate_token(r->k + t * r->k_stride, line, r->k_out + t * r->kv_heads * r->width, r->kv_heads, r->width);
    }
}

/* q [tokens, heads, width] and k [tokens, kv_heads, width] (token strides given) turned by the angles of pos. */
EXPORT void deepinfer_rope(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const int32_t *pos, const float *cos_sin,
                           float *q_out, float *k_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int threads) {
    Rope r = {q, k, cos_sin, pos, q_out, k_out, q_stride, k_stride, heads, kv_heads, width};
    over_rows(tokens, tokens * (heads + kv_heads) * width, rotate_rows, &r, threads);
}

/* x / (1 + 2^(-x log2 e)); the power is infinite from 2^126 on, where exp2_ps ends. */
INLINE __m256 silu(__m256 x) {
    const __m256 power = _mm256_mul_ps(x, _mm256_set1_ps(-1.44269504f)), top = _mm256_set1_ps(126.0f);
    const __m256 e = _mm256_blendv_ps(exp2_ps(power), _mm256_set1_ps(INFINITY), _mm256_cmp_ps(power, top, _CMP_GT_OQ));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

typedef struct {
    const float *x;
    float *y;
    int64_t x_stride, width;
} Gate;

static void gate_rows(void *context, int64_t first, int64_t last, int worker) {
    const Gate *g = context;
    for (int64_t r = first; r < last; r++) {
        const float *gate = g->x + r * g->x_stride, *up = gate + g->width;
        float *out = g->y + r * g->width;
        int64_t i = 0;
        for (; i + 8 <= g->width; i += 8)
            _mm256_storeu_ps(out + i, _mm256_mul_ps(silu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
        if (i == g->width) continue;
        const __m256i lanes = first_lanes(g->width - i);
        const __m256 v = _mm256_mul_ps(silu(_mm256_maskload_ps(gate + i, lanes)), _mm256_maskload_ps(up + i, lanes));
        _mm256_maskstore_ps(out + i, lanes, v);
    }
}

/* y [rows, width] = silu(x[:, :width]) * x[:, width:], x [rows, 2 width] with row stride x_stride. */
EXPORT void deepinfer_silu_mul(const float *x, int64_t x_stride, float *y, int64_t rows, int64_t width, int threads) {
    Gate g = {x, y, x_stride, width};
    over_rows(rows, 4 * rows * width, gate_rows, &g, threads);
}

/* Nearest bfloat16, even on ties; NaN stays NaN (rounding its bits could make it infinite). */
INLINE uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if (value != value) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static void store_line(const float *x, void *line, int type, int64_t width) {
    if (type == TYPE_F32) {
        memcpy(line, x, width * sizeof(float));
        return;
    }
    for (int64_t i = 0; i < width; i++)
        ((uint16_t *)line)[i] = type == TYPE_BF16 ? to_bf16(x[i]) : _cvtss_sh(x[i], _MM_FROUND_TO_NEAREST_INT);
}

typedef struct {
    const float *k, *v;
    char *k_pool, *v_pool;
    const int32_t *page_table, *slot_ids, *row_of, *pos;
    int64_t k_stride, v_stride, table_stride, page_tokens, width;
    int type;
} Write;

static void write_lines(void *context, int64_t first, int64_t last, int worker) {
    const Write *w = context;
    const int64_t line_bytes = w->width * type_size(w->type);
    for (int64_t t = first; t < last; t++) {
        const int64_t page = w->page_table[w->slot_ids[w->row_of[t]] * w->table_stride + w->pos[t] / w->page_tokens];
        const int64_t at = (page * w->page_tokens + w->pos[t] % w->page_tokens) * line_bytes;
        store_line(w->k + t * w->k_stride, w->k_pool + at, w->type, w->width);
        store_line(w->v + t * w->v_stride, w->v_pool + at, w->type, w->width);
    }
}

/* k, v [tokens, width] (token strides given) into pools [pages, page_tokens, width] of `type`, width = kv heads * D. */
EXPORT void deepinfer_cache_write(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *k_pool, void *v_pool, int type,
                                  const int32_t *page_table, int64_t table_stride, const int32_t *slot_ids, const int32_t *row_of,
                                  const int32_t *pos, int64_t tokens, int64_t page_tokens, int64_t width, int threads) {
    Write w = {k, v, k_pool, v_pool, page_table, slot_ids, row_of, pos, k_stride, v_stride, table_stride, page_tokens, width, type};
    over_rows(tokens, 4 * tokens * width, write_lines, &w, threads);
}
