/* Norm, rotary positions, gated activation and cache writes: one pass over each row, memory bound.
 *
 * Rows are split among threads only when there is enough work to pay for waking them (a few us).
 */
#include "kernels.h"

enum { PARALLEL_ELEMENTS = 8192 };

INLINE int team(int64_t elements, int threads) { return elements >= PARALLEL_ELEMENTS ? threads : 1; }

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

/* y [rows, width] = norm(x + residual) * weight and total = x + residual; residual and total NULL: of x itself. */
EXPORT void deepinfer_rms_norm(const float *x, int64_t x_stride, const float *residual, int64_t residual_stride, const float *weight,
                               float *y, float *total, int64_t rows, int64_t width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (team(rows * width, threads) > 1)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r * x_stride, residual ? residual + r * residual_stride : NULL, weight, y + r * width, total ? total + r * width : NULL,
                 width, eps);
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

/* q [tokens, heads, width] and k [tokens, kv_heads, width] (token strides given) turned by the angles of pos. */
EXPORT void deepinfer_rope(const float *q, int64_t q_stride, const float *k, int64_t k_stride, const int32_t *pos, const float *cos_sin,
                           float *q_out, float *k_out, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (team(tokens * (heads + kv_heads) * width, threads) > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const float *line = cos_sin + pos[t] * width;
        rotate_token(q + t * q_stride, line, q_out + t * heads * width, heads, width);
        rotate_token(k + t * k_stride, line, k_out + t * kv_heads * width, kv_heads, width);
    }
}

/* x / (1 + 2^(-x log2 e)); the power is infinite from 2^126 on, where exp2_ps ends. */
INLINE __m256 silu(__m256 x) {
    const __m256 power = _mm256_mul_ps(x, _mm256_set1_ps(-1.44269504f)), top = _mm256_set1_ps(126.0f);
    const __m256 e = _mm256_blendv_ps(exp2_ps(power), _mm256_set1_ps(INFINITY), _mm256_cmp_ps(power, top, _CMP_GT_OQ));
    return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
}

/* y [rows, width] = silu(x[:, :width]) * x[:, width:], x [rows, 2 width] with row stride x_stride. */
EXPORT void deepinfer_silu_mul(const float *x, int64_t x_stride, float *y, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for num_threads(threads) if (team(4 * rows * width, threads) > 1)
    for (int64_t r = 0; r < rows; r++) {
        const float *gate = x + r * x_stride, *up = gate + width;
        float *out = y + r * width;
        int64_t i = 0;
        for (; i + 8 <= width; i += 8) _mm256_storeu_ps(out + i, _mm256_mul_ps(silu(_mm256_loadu_ps(gate + i)), _mm256_loadu_ps(up + i)));
        if (i == width) continue;
        const __m256i lanes = first_lanes(width - i);
        const __m256 v = _mm256_mul_ps(silu(_mm256_maskload_ps(gate + i, lanes)), _mm256_maskload_ps(up + i, lanes));
        _mm256_maskstore_ps(out + i, lanes, v);
    }
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

/* k, v [tokens, width] (token strides given) into pools [pages, page_tokens, width] of `type`, width = kv heads * D. */
EXPORT void deepinfer_cache_write(const float *k, int64_t k_stride, const float *v, int64_t v_stride, void *k_pool, void *v_pool, int type,
                                  const int32_t *page_table, int64_t table_stride, const int32_t *slot_ids, const int32_t *row_of,
                                  const int32_t *pos, int64_t tokens, int64_t page_tokens, int64_t width, int threads) {
    const int64_t line_bytes = width * type_size(type);
#pragma omp parallel for num_threads(threads) if (team(4 * tokens * width, threads) > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t page = page_table[slot_ids[row_of[t]] * table_stride + pos[t] / page_tokens];
        const int64_t at = (page * page_tokens + pos[t] % page_tokens) * line_bytes;
        store_line(k + t * k_stride, (char *)k_pool + at, type, width);
        store_line(v + t * v_stride, (char *)v_pool + at, type, width);
    }
}
