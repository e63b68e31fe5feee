/* Linear layer on quantised weights: 4 bits with scale and minimum per group of 32 (q4), 8 bits with a scale per
 * group of 32 (q8) or per output (int8). Activations are quantised here, per row and group of 32, to -127 .. 127.
 *
 * Weight layout: blocks of 8 outputs, one per 32-bit lane. quants: [N / 8][K / 32][words][8 outputs][4 bytes], a word
 * holding 4 consecutive k of one output (q4: low nibbles k .. k+3, high nibbles k+16 .. k+19, so 4 words a group
 * instead of 8). scales: [N / 8][K / 32][8] f16 (q4: 8 scales then 8 minimums; int8: [N] f32).
 *
 * q4: weights are 0 .. 15, so one vpmaddubsw (u8 x s8, pairs into int16) adds 4 products a lane, two in each half, and
 * eight of them stay below 8 * 2 * 15 * 127 = 30480 < 2^15: the whole group is summed in int16 and widened once. For
 * a row, 8 outputs and a group (256 products) that is 8 broadcasts, 8 vpmaddubsw, 7 vpaddw, then vpmaddwd, a
 * conversion, 2 broadcasts, a multiplication and 2 FMA: 20 vector operations and 12 loads (two of accumulators), 6 cycles
 * of a core with four vector pipes and two load ports; f32 FMA would take 16. Unpacking the nibbles (4 loads, 12
 * operations) is shared by the rows of a tile. Measured on Zen 3: 80 G products/s a core, against 43 for f32.
 *
 * q8: |w| x (x with the sign of w) keeps vpmaddubsw free of saturation (2 * 128 * 127 < 2^15), but two results do not fit
 * int16, so each is widened: 4 operations for 32 products where q4 needs 2.
 *
 * The integer sums are exact and the float combination is one chain per output, groups in ascending order:
 *     acc = fma(d[n, g] * s[g], dot, acc) over all g; then (q4) acc = fma(m[n, g], s[g] * sum[g], acc) over all g
 * (int8: acc = fma(s[g], dot, acc), then acc * d[n]). Nothing depends on the tile or the thread, so a row gives the same
 * bits in any company.
 */
#include "kernels.h"

enum { GROUP = 32, LANES = 8, TILE = 8, ROWS_IN_CACHE = 64, SERIAL_ELEMENTS = 16384, BLOCKS_AHEAD = 4 };
enum { Q4 = 0, Q8 = 1, INT8 = 2 }; /* in step with lib.py */

typedef struct {
    const int8_t *xq; /* [rows / 8][k / 32][8][32]: a tile of rows is walked with one pointer */
    const float *xs;  /* [rows / 8][k / 32][8][2]: s and s * sum */
    const uint8_t *quants;
    const void *scales;
    const float *bias;
    float *y;
    int64_t rows, n, groups;
    int format;
} Quantised;

/* One row into int8 groups, 8 groups apart: s = amax / 127, q = round_to_even(x * (127 / amax)); also s * sum(q).
 * Integers cannot hold NaN, so s carries it. Groups below 1e-35, whose inverse would overflow, count as 0. */
static void quantise_row(const float *x, int64_t k, int8_t *q, float *s) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    for (int64_t g = 0; g < k / GROUP; g++) {
        __m256 v[4];
        __m256i n[4];
        for (int i = 0; i < 4; i++) v[i] = _mm256_loadu_ps(x + g * GROUP + 8 * i);
        __m256 top = _mm256_andnot_ps(sign, v[0]);
        for (int i = 1; i < 4; i++) top = _mm256_max_ps(top, _mm256_andnot_ps(sign, v[i]));
        const __m256 nan = _mm256_or_ps(_mm256_cmp_ps(v[0], v[1], _CMP_UNORD_Q), _mm256_cmp_ps(v[2], v[3], _CMP_UNORD_Q));
        const float amax = _mm256_movemask_ps(nan) ? NAN : max_lanes(top);
        const __m256 inverse = _mm256_set1_ps(amax > 1e-35f ? 127.0f / amax : 0.0f);
        for (int i = 0; i < 4; i++) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
        const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
        const __m256i halves = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* the packs work inside 128-bit lanes */
        _mm256_storeu_si256((__m256i *)(q + g * TILE * GROUP), _mm256_permutevar8x32_epi32(halves, order));
        float *sg = s + g * TILE * 2;
        sg[0] = amax / 127.0f;
        sg[1] = sg[0] * sum_lanes(_mm256_cvtepi32_ps(sum)); /* whole numbers below 2^24: exact */
    }
}

INLINE __m256i word(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
    return _mm256_set1_epi32(four);
}

/* Four products a lane, in two int16 sums. The broadcast is tied to its product: left to itself the compiler hoists the
 * broadcasts of a whole group and spills the unpacked weights instead. */
INLINE __m256i products(__m256i u, const int8_t *x) {
    __m256i t;
    __asm__("vpbroadcastd %1, %0\n\tvpmaddubsw %0, %2, %0" : "=&x"(t) : "m"(*(const char(*)[4])x), "x"(u));
    return t;
}

/* The eight words of a group in two chains: one chain of eight additions would be waiting for its own latency. */
INLINE __m256i group_sum(const __m256i *u, const int8_t *x) {
    __m256i even = products(u[0], x), odd = products(u[1], x + 4);
#pragma GCC unroll 3
    for (int i = 2; i < 8; i += 2) {
        even = _mm256_add_epi16(even, products(u[i], x + 4 * i));
        odd = _mm256_add_epi16(odd, products(u[i + 1], x + 4 * i + 4));
    }
    return _mm256_add_epi16(even, odd);
}

/* R rows by 8 outputs, 4-bit weights. */
INLINE void q4_tile(int R, const int8_t *x, const float *s, const uint8_t *w, const uint16_t *scales, int64_t groups, __m256 *acc) {
    const __m256i ones = _mm256_set1_epi16(1), nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++, w += 128, x += TILE * GROUP) {
        __m256i u[8];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const __m256i both = _mm256_loadu_si256((const __m256i *)w + i);
            u[i] = _mm256_and_si256(both, nibble);
            u[i + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
        }
        const __m256 d = load_f16(scales + g * 16);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(group_sum(u, x + r * GROUP), ones));
            acc[r] = _mm256_fmadd_ps(_mm256_mul_ps(d, _mm256_broadcast_ss(s + (g * TILE + r) * 2)), dot, acc[r]);
        }
    }
    for (int64_t g = 0; g < groups; g++) { /* apart, so that the first loop has a register for d */
        const __m256 m = load_f16(scales + g * 16 + 8);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r] = _mm256_fmadd_ps(m, _mm256_broadcast_ss(s + (g * TILE + r) * 2 + 1), acc[r]);
    }
}

/* R rows by 8 outputs, 8-bit weights; per_output: one scale an output, applied by the caller. */
INLINE void q8_tile(int R, const int8_t *x, const float *s, const uint8_t *w, const uint16_t *scales, int64_t groups, __m256 *acc, int per_output) {
    const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; g++, w += 256, scales += LANES, x += TILE * GROUP, s += TILE * 2) {
        __m256i dot[TILE];
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m256i v = _mm256_loadu_si256((const __m256i *)w + i), size = _mm256_abs_epi8(v);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const __m256i signed_x = _mm256_sign_epi8(word(x + r * GROUP + 4 * i), v);
                const __m256i t = _mm256_madd_epi16(_mm256_maddubs_epi16(size, signed_x), ones);
                dot[r] = i ? _mm256_add_epi32(dot[r], t) : t;
            }
        }
        const __m256 d = per_output ? _mm256_setzero_ps() : load_f16(scales);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const __m256 sr = _mm256_broadcast_ss(s + 2 * r);
            acc[r] = _mm256_fmadd_ps(per_output ? sr : _mm256_mul_ps(d, sr), _mm256_cvtepi32_ps(dot[r]), acc[r]);
        }
    }
}

/* Rows m .. m + R by the 8 outputs of block b: tile, per-output scale, bias, store. */
INLINE void finish_tile(int R, int format, const Quantised *l, int64_t m, int64_t b) {
    __m256 acc[TILE];
    const int64_t left = l->n - b * LANES, first = m / TILE * l->groups * TILE + m % TILE;
    const int8_t *x = l->xq + first * GROUP;
    const float *s = l->xs + first * 2;
    const uint8_t *w = l->quants + b * l->groups * (format == Q4 ? 128 : 256);
    const uint16_t *scales = (const uint16_t *)l->scales + b * l->groups * (format == Q4 ? 16 : LANES);
    if (format == Q4)
        q4_tile(R, x, s, w, scales, l->groups, acc);
    else
        q8_tile(R, x, s, w, scales, l->groups, acc, format == INT8);
    const __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)min_i64(left, LANES)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256 d = format == INT8 ? _mm256_loadu_ps((const float *)l->scales + b * LANES) : _mm256_setzero_ps();
    const __m256 bias = l->bias ? _mm256_maskload_ps(l->bias + b * LANES, inside) : _mm256_setzero_ps();
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        if (format == INT8) acc[r] = _mm256_mul_ps(acc[r], d);
        if (l->bias) acc[r] = _mm256_add_ps(acc[r], bias);
        float *out = l->y + (m + r) * l->n + b * LANES;
        if (left >= LANES)
            _mm256_storeu_ps(out, acc[r]);
        else
            _mm256_maskstore_ps(out, inside, acc[r]);
    }
}

#define TILE_OF(R, FORMAT, NAME) \
    static __attribute__((noinline)) void NAME(const Quantised *l, int64_t m, int64_t b) { finish_tile(R, FORMAT, l, m, b); }
#define TILES_OF(FORMAT, NAME) \
    TILE_OF(1, FORMAT, NAME##_1) TILE_OF(2, FORMAT, NAME##_2) TILE_OF(3, FORMAT, NAME##_3) TILE_OF(4, FORMAT, NAME##_4)
TILES_OF(Q4, q4)
TILES_OF(Q8, q8)
TILES_OF(INT8, int8)

TILE_OF(8, Q4, q4_8)

typedef void (*Tile)(const Quantised *, int64_t, int64_t);
static const Tile TILES[3][TILE + 1] = {
    {0, q4_1, q4_2, q4_3, q4_4, 0, 0, 0, q4_8},
    {0, q8_1, q8_2, q8_3, q8_4, 0, 0, 0, 0},
    {0, int8_1, int8_2, int8_3, int8_4, 0, 0, 0, 0},
};

/* Weights come from memory once; asking a few blocks ahead hides what the hardware's own prefetch, which stops at
 * every 4 KiB, does not. */
static void prefetch_block(const Quantised *l, int format, int64_t b) {
    const int64_t code_bytes = l->groups * (format == Q4 ? 128 : 256), scale_bytes = l->groups * (format == Q4 ? 32 : 16);
    const char *codes = (const char *)l->quants + b * code_bytes, *scales = (const char *)l->scales + b * scale_bytes;
    for (int64_t i = 0; i < code_bytes; i += 64) __builtin_prefetch(codes + i);
    if (format == INT8) return;
    for (int64_t i = 0; i < scale_bytes; i += 64) __builtin_prefetch(scales + i);
}

/* A block of 64 rows of x stays in the second-level cache, a block of weights (5 KiB at K = 1024) in the first. */
static void region(const Quantised *l, int format, int64_t m0, int64_t m1, int64_t b0, int64_t b1) {
    const int widest = format == Q4 ? TILE : 4; /* q8 keeps one integer sum a row in a register */
    for (int64_t m = m0; m < m1; m += ROWS_IN_CACHE) {
        const int64_t end = min_i64(m + ROWS_IN_CACHE, m1);
        for (int64_t b = b0; b < b1; b++) {
            if (m == m0) prefetch_block(l, format, min_i64(b + BLOCKS_AHEAD, b1 - 1));
            int64_t r = m;
            while (r < end) {
                int64_t rows = min_i64(end - r, widest);
                if (rows > 4 && rows < TILE) rows = 4;
                TILES[format][rows](l, r, b);
                r += rows;
            }
        }
    }
}

typedef struct {
    const float *x;
    int8_t *xq;
    float *xs;
    int64_t x_stride, k;
} Rows;

static void quantise_rows(void *context, int64_t m0, int64_t m1, int worker) {
    const Rows *a = context;
    for (int64_t m = m0; m < m1; m++) {
        const int64_t first = m / TILE * (a->k / GROUP) * TILE + m % TILE;
        quantise_row(a->x + m * a->x_stride, a->k, a->xq + first * GROUP, a->xs + first * 2);
    }
}

static void some_blocks(void *context, int64_t first, int64_t last, int worker) {
    const Quantised *l = context;
    region(l, l->format, 0, l->rows, first, last);
}

static void some_tiles(void *context, int64_t first, int64_t last, int worker) {
    const Quantised *l = context;
    region(l, l->format, first * TILE, min_i64(last * TILE, l->rows), 0, ceil_div(l->n, LANES));
}

/* y [rows, n] = x [rows, k] (row stride x_stride) times the packed weight, plus bias (may be NULL). k % 32 == 0.
 * Returns 0, or -1 when there is no memory for the quantised rows. */
EXPORT int deepinfer_linear_quant(const float *x, int64_t x_stride, const uint8_t *quants, const void *scales, int format,
                                  const float *bias, float *y, int64_t rows, int64_t n, int64_t k, int threads) {
    const int64_t groups = k / GROUP, blocks = ceil_div(n, LANES), tiles = ceil_div(rows, TILE);
    const int64_t pieces = threads * PIECES_PER_THREAD;
    if (rows == 0) return 0;
    int8_t *xq = aligned_scratch(tiles * TILE * (k + groups * 2 * sizeof(float)));
    if (!xq) return -1;
    float *xs = (float *)(xq + tiles * TILE * k);
    Rows in = {x, xq, xs, x_stride, k};
    Quantised l = {xq, xs, quants, scales, bias, y, rows, n, groups, format};
    if (rows * n * k < SERIAL_PRODUCTS) threads = 1;
    deepinfer_parallel(rows, rows * k <= SERIAL_ELEMENTS ? 1 : pieces, quantise_rows, &in, threads);
    if (blocks >= 2 * threads || tiles < pieces)
        deepinfer_parallel(blocks, pieces, some_blocks, &l, threads);
    else
        deepinfer_parallel(tiles, pieces, some_tiles, &l, threads);
    free(xq);
    return 0;
}
