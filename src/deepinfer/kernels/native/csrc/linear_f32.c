/* Linear layer on float weights (stored as f32, bf16 or f16; computed in f32).
 *
 * Weight layout: panels of 16 outputs, [ceil(N / 16)][K][16], so that one step of k reads one cache line (f32).
 * A tile of R <= 6 rows by 16 outputs keeps 2 R accumulators in registers; a step of k costs 2 loads of weights,
 * R broadcasts and 2 R FMA: at R = 6 that is 12 FMA (6 cycles on two pipes) against 8 loads (4 cycles), so the
 * FMA pipes are the limit. Every output is a sum of chains acc = fma(x[k], w[k], acc) over 64 values of k each,
 * added in ascending order, whatever R is and wherever the K loop is cut (at a multiple of 64) to keep the panel
 * in the first-level cache: one row alone gives the same bits as one row of a thousand. Short chains keep the
 * rounding error near that of blocked library products; a single chain over K = 1536 had twice as much.
 */
#include "kernels.h"

enum { PANEL = 16, TILE_ROWS = 6, CHAIN = 64, BLOCK_K = 6 * CHAIN, BLOCK_ROWS = 96 };

typedef struct {
    const float *x;
    const void *w;
    const float *bias;
    float *y;
    int64_t rows, n, k, x_stride;
    int type;
} Linear;

/* c[r][0..15] over k steps for R rows; `resume` adds to what is held in c. */
INLINE void tile(int R, const float *a, int64_t lda, const void *b, int64_t k, float *c, int64_t ldc, int type, int resume) {
    for (int64_t k0 = 0; k0 < k; k0 += CHAIN) {
        __m256 lo[TILE_ROWS], hi[TILE_ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) lo[r] = hi[r] = _mm256_setzero_ps();
        for (int64_t i = k0; i < min_i64(k, k0 + CHAIN); i++) {
            const __m256 b0 = load_as_f32(b, i * PANEL, type), b1 = load_as_f32(b, i * PANEL + 8, type);
#pragma GCC unroll 6
            for (int r = 0; r < R; r++) {
                const __m256 v = _mm256_broadcast_ss(a + r * lda + i);
                lo[r] = _mm256_fmadd_ps(v, b0, lo[r]);
                hi[r] = _mm256_fmadd_ps(v, b1, hi[r]);
            }
        }
        const int add = resume || k0 > 0;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            float *out = c + r * ldc;
            _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), lo[r]) : lo[r]);
            _mm256_storeu_ps(out + 8, add ? _mm256_add_ps(_mm256_loadu_ps(out + 8), hi[r]) : hi[r]);
        }
    }
}

#define TILE_OF(R, T, NAME) \
    static __attribute__((noinline)) void NAME(const float *a, int64_t lda, const void *b, int64_t k, float *c, int64_t ldc, int resume) { \
        tile(R, a, lda, b, k, c, ldc, T, resume); \
    }
#define TILES_OF(T, NAME) \
    TILE_OF(1, T, NAME##_1) TILE_OF(2, T, NAME##_2) TILE_OF(3, T, NAME##_3) \
    TILE_OF(4, T, NAME##_4) TILE_OF(5, T, NAME##_5) TILE_OF(6, T, NAME##_6)
TILES_OF(TYPE_F32, tile_f32)
TILES_OF(TYPE_F16, tile_f16)
TILES_OF(TYPE_BF16, tile_bf16)

typedef void (*Tile)(const float *, int64_t, const void *, int64_t, float *, int64_t, int);
static const Tile TILES[3][TILE_ROWS] = {
    {tile_f32_1, tile_f32_2, tile_f32_3, tile_f32_4, tile_f32_5, tile_f32_6},
    {tile_f16_1, tile_f16_2, tile_f16_3, tile_f16_4, tile_f16_5, tile_f16_6},
    {tile_bf16_1, tile_bf16_2, tile_bf16_3, tile_bf16_4, tile_bf16_5, tile_bf16_6},
};

/* One row by two panels: a single panel has two chains only and would wait for the latency of the FMA. */
INLINE void row_of_two_panels(const float *a, const void *b, int64_t k, float *out, int type) {
    for (int64_t k0 = 0; k0 < k; k0 += CHAIN) {
        __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
        for (int64_t i = k0; i < min_i64(k, k0 + CHAIN); i++) {
            const __m256 v = _mm256_broadcast_ss(a + i);
            acc[0] = _mm256_fmadd_ps(v, load_as_f32(b, i * PANEL, type), acc[0]);
            acc[1] = _mm256_fmadd_ps(v, load_as_f32(b, i * PANEL + 8, type), acc[1]);
            acc[2] = _mm256_fmadd_ps(v, load_as_f32(b, (k + i) * PANEL, type), acc[2]);
            acc[3] = _mm256_fmadd_ps(v, load_as_f32(b, (k + i) * PANEL + 8, type), acc[3]);
        }
        for (int j = 0; j < 4; j++)
            _mm256_storeu_ps(out + 8 * j, k0 ? _mm256_add_ps(_mm256_loadu_ps(out + 8 * j), acc[j]) : acc[j]);
    }
}

static __attribute__((noinline)) void row_f32(const float *a, const void *b, int64_t k, float *out) {
    row_of_two_panels(a, b, k, out, TYPE_F32);
}
static __attribute__((noinline)) void row_f16(const float *a, const void *b, int64_t k, float *out) {
    row_of_two_panels(a, b, k, out, TYPE_F16);
}
static __attribute__((noinline)) void row_bf16(const float *a, const void *b, int64_t k, float *out) {
    row_of_two_panels(a, b, k, out, TYPE_BF16);
}

INLINE const char *weight_at(const Linear *l, int64_t panel, int64_t k) {
    return (const char *)l->w + (panel * l->k + k) * PANEL * type_size(l->type);
}

static void add_bias(const Linear *l, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
    const int64_t n0 = p0 * PANEL, n1 = min_i64(p1 * PANEL, l->n);
    for (int64_t m = m0; m < m1; m++)
        for (int64_t n = n0; n < n1; n++) l->y[m * l->n + n] += l->bias[n];
}

/* Few rows: each panel is read once, straight from memory, without cutting K. */
static void few_rows(const Linear *l, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
    float out[TILE_ROWS * PANEL];
    const int rows = (int)(m1 - m0);
    const float *a = l->x + m0 * l->x_stride;
    for (int64_t p = p0; p < p1; p++) {
        const int64_t n0 = p * PANEL, width = min_i64(l->n - n0, PANEL);
        if (rows == 1 && p + 1 < p1) {
            void (*row)(const float *, const void *, int64_t, float *) =
                l->type == TYPE_F32 ? row_f32 : l->type == TYPE_F16 ? row_f16 : row_bf16;
            row(a, weight_at(l, p, 0), l->k, out);
            memcpy(l->y + m0 * l->n + n0, out, min_i64(l->n - n0, 2 * PANEL) * sizeof(float));
            p++;
            continue;
        }
        TILES[l->type][rows - 1](a, l->x_stride, weight_at(l, p, 0), l->k, out, PANEL, 0);
        for (int r = 0; r < rows; r++) memcpy(l->y + (m0 + r) * l->n + n0, out + r * PANEL, width * sizeof(float));
    }
}

/* One panel by one block of rows by one block of K; the chain rests in y between blocks of K. */
static void block(const Linear *l, int64_t m0, int64_t m1, int64_t p, int64_t k0, int64_t k1, int64_t ldc, float *c) {
    float unpacked[BLOCK_K * PANEL] __attribute__((aligned(64)));
    const void *w = weight_at(l, p, k0);
    if (l->type != TYPE_F32) { /* once for all row tiles; exact, so the bits stay */
        for (int64_t i = 0; i < (k1 - k0) * PANEL; i += 8) _mm256_store_ps(unpacked + i, load_as_f32(w, i, l->type));
        w = unpacked;
    }
    for (int64_t m = m0; m < m1; m += TILE_ROWS) {
        const int64_t rows = min_i64(m1 - m, TILE_ROWS);
        TILES[TYPE_F32][rows - 1](l->x + m * l->x_stride + k0, l->x_stride, w, k1 - k0, c + (m - m0) * ldc, ldc, k0 > 0);
    }
}

/* Many rows: a block of 96 x 384 of x (144 KiB) stays in the second-level cache, one of
 * 384 x 16 of w (24 KiB) in the first. */
static void many_rows(const Linear *l, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
    float edge[BLOCK_ROWS * PANEL]; /* the last panel when N is no multiple of 16 */
    const int64_t step = ceil_div(ceil_div(l->k, ceil_div(l->k, BLOCK_K)), CHAIN) * CHAIN;
    for (int64_t m = m0; m < m1; m += BLOCK_ROWS) {
        const int64_t m_end = min_i64(m + BLOCK_ROWS, m1);
        for (int64_t k = 0; k < l->k; k += step) {
            for (int64_t p = p0; p < p1; p++) {
                const int whole = (p + 1) * PANEL <= l->n;
                float *c = whole ? l->y + m * l->n + p * PANEL : edge;
                block(l, m, m_end, p, k, min_i64(k + step, l->k), whole ? l->n : PANEL, c);
            }
        }
        if (p1 * PANEL > l->n) {
            const int64_t n0 = (p1 - 1) * PANEL;
            for (int64_t r = m; r < m_end; r++)
                memcpy(l->y + r * l->n + n0, edge + (r - m) * PANEL, (l->n - n0) * sizeof(float));
        }
    }
}

static void part(const Linear *l, int64_t m0, int64_t m1, int64_t p0, int64_t p1) {
    if (m1 - m0 <= TILE_ROWS)
        few_rows(l, m0, m1, p0, p1);
    else
        many_rows(l, m0, m1, p0, p1);
    if (l->bias) add_bias(l, m0, m1, p0, p1);
}

static void some_panels(void *context, int64_t first, int64_t last, int worker) {
    const Linear *l = context;
    part(l, 0, l->rows, first, last);
}

static void some_rows(void *context, int64_t first, int64_t last, int worker) {
    const Linear *l = context;
    part(l, first, last, 0, ceil_div(l->n, PANEL));
}

/* y [rows, n] = x [rows, k] (row stride x_stride) times the packed weight, plus bias (may be NULL). */
EXPORT void deepinfer_linear_float(const float *x, int64_t x_stride, const void *w, int type, const float *bias, float *y,
                                   int64_t rows, int64_t n, int64_t k, int threads) {
    Linear l = {x, w, bias, y, rows, n, k, x_stride, type};
    const int64_t panels = ceil_div(n, PANEL), pieces = threads * PIECES_PER_THREAD;
    if (rows == 0) return;
    if (rows * n * k < SERIAL_PRODUCTS) threads = 1;
    if (panels >= 2 * threads || rows < pieces)
        deepinfer_parallel(panels, pieces, some_panels, &l, threads);
    else
        deepinfer_parallel(rows, pieces, some_rows, &l, threads);
}

typedef struct {
    const char *w;
    char *packed;
    int64_t n, k;
    size_t size;
} Pack;

static void pack_panels(void *context, int64_t first, int64_t last, int worker) {
    const Pack *a = context;
    const size_t size = a->size;
    for (int64_t p = first; p < last; p++) {
        char *out = a->packed + p * a->k * PANEL * size;
        memset(out, 0, a->k * PANEL * size);
        for (int64_t j = 0; j < min_i64(a->n - p * PANEL, PANEL); j++)
            for (int64_t i = 0; i < a->k; i++)
                memcpy(out + (i * PANEL + j) * size, a->w + ((p * PANEL + j) * a->k + i) * size, size);
    }
}

/* w [n, k] (row major, type) -> panels of the same type; outputs past n are zero. */
EXPORT void deepinfer_pack_float(const void *w, int type, void *packed, int64_t n, int64_t k, int threads) {
    Pack a = {w, packed, n, k, type_size(type)};
    deepinfer_parallel(ceil_div(n, PANEL), threads * PIECES_PER_THREAD, pack_panels, &a, threads);
}
