/* Argmax of logits plus Gumbel noise, bit-equal to kernels/noise.py, which states the algorithm: Philox4x32-10 words,
 * portable logarithm without fused operations, one rounding each.
 *
 * Eight Philox counters run side by side; a counter serves four neighbouring tokens, so one round trip gives 32 noises:
 * about 330 vector operations, two logarithms included. Blocks of 32 whose logits are so low that no noise could
 * lift them to the winner (masked vocabularies, long tails) are skipped.
 */
#include "kernels.h"

enum { BLOCK = 32 };

/* The winner scores at least max - 3.2 and a column at most logit + 22.9; one more for the rounding of sums, which is below
 * 2^-7 as long as logits are below 2^16. */
static const float REACH = 27.1f, SMALL_LOGIT = 65536.0f;

static const float LOG_COEFFICIENTS[8] = {0x1.5555a4p-2f,  -0x1.00004ap-2f, 0x1.99699ep-3f, -0x1.54ed96p-3f,
                                          0x1.28807ap-3f, -0x1.0d98f2p-3f, 0x1.acf4bap-4f, -0x1.71e354p-5f};

/* The noise of one row: counter words 1 .. 3 and key, see kernels/noise.py. */
typedef struct {
    uint32_t c1, c2, c3, k0, k1;
} Key;

/* Best score of each lane and its column; a lane sees its columns in ascending order. */
typedef struct {
    __m256 score;
    __m256i column;
} Best;

INLINE void consider(Best *best, __m256 score, __m256i column) {
    const __m256 better = _mm256_cmp_ps(score, best->score, _CMP_GT_OQ);
    best->score = _mm256_blendv_ps(best->score, score, better);
    best->column = _mm256_blendv_epi8(best->column, column, _mm256_castps_si256(better));
}

/* High and low halves of eight products a * b of 32 bits. */
INLINE void multiply(__m256i a, __m256i b, __m256i *high, __m256i *low) {
    const __m256i even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), b);
    *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}

INLINE void philox(__m256i c0, const Key *key, __m256i *words) {
    const __m256i first = _mm256_set1_epi64x(0xD2511F53), second = _mm256_set1_epi64x(0xCD9E8D57);
    __m256i c1 = _mm256_set1_epi32((int)key->c1), c2 = _mm256_set1_epi32((int)key->c2), c3 = _mm256_set1_epi32((int)key->c3);
    uint32_t k0 = key->k0, k1 = key->k1;
    for (int round = 0; round < 10; round++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        __m256i high0, low0, high1, low1;
        multiply(c0, first, &high0, &low0);
        multiply(c2, second, &high1, &low1);
        c0 = _mm256_xor_si256(_mm256_xor_si256(high1, c1), _mm256_set1_epi32((int)k0));
        c2 = _mm256_xor_si256(_mm256_xor_si256(high0, c3), _mm256_set1_epi32((int)k1));
        c1 = low1;
        c3 = low0;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

INLINE __m256 mul_add(__m256 a, __m256 b, __m256 c) { return _mm256_add_ps(_mm256_mul_ps(a, b), c); } /* two roundings */

INLINE void split(__m256 x, __m256 *f, __m256 *k) {
    const __m256i bits = _mm256_castps_si256(x), n = _mm256_srai_epi32(_mm256_sub_epi32(bits, _mm256_set1_epi32(0x3F400000)), 23);
    *f = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(n, 23))), _mm256_set1_ps(1.0f));
    *k = _mm256_cvtepi32_ps(n);
}

INLINE __m256 log1p_2k(__m256 f, __m256 k) {
    const __m256 z = _mm256_mul_ps(f, f);
    __m256 y = _mm256_set1_ps(LOG_COEFFICIENTS[7]);
#pragma GCC unroll 7
    for (int i = 6; i >= 0; i--) y = mul_add(y, f, _mm256_set1_ps(LOG_COEFFICIENTS[i]));
    y = _mm256_mul_ps(_mm256_mul_ps(y, f), z);
    y = _mm256_add_ps(y, _mm256_mul_ps(k, _mm256_set1_ps(-0x1.bd0106p-13f)));
    y = _mm256_sub_ps(y, _mm256_mul_ps(z, _mm256_set1_ps(0.5f)));
    return _mm256_add_ps(_mm256_add_ps(f, y), _mm256_mul_ps(k, _mm256_set1_ps(0.693359375f)));
}

/* (float(r) + 0.5) * 2^-32 of unsigned words: both halves are exact, so their sum is rounded once. */
INLINE __m256 unit(__m256i r) {
    const __m256 high = _mm256_cvtepi32_ps(_mm256_srli_epi32(r, 16)), low = _mm256_cvtepi32_ps(_mm256_and_si256(r, _mm256_set1_epi32(0xFFFF)));
    const __m256 value = _mm256_add_ps(_mm256_mul_ps(high, _mm256_set1_ps(65536.0f)), low);
    return _mm256_mul_ps(_mm256_add_ps(value, _mm256_set1_ps(0.5f)), _mm256_set1_ps(0x1p-32f));
}

INLINE __m256 gumbel(__m256i r) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 small = _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_srli_epi32(r, 30), _mm256_setzero_si256()));
    __m256 f, k;
    split(unit(_mm256_xor_si256(r, _mm256_set1_epi32(-1))), &f, &k);
    f = _mm256_blendv_ps(f, _mm256_xor_ps(unit(r), sign), small);
    k = _mm256_andnot_ps(small, k);
    const __m256 e = _mm256_xor_ps(log1p_2k(f, k), sign);
    split(e, &f, &k);
    return _mm256_xor_ps(log1p_2k(f, k), sign);
}

/* 32 columns from `first` (a multiple of 32) whose tokens are the columns themselves. */
INLINE void consider_block(Best *best, const float *logits, int64_t first, const Key *key) {
    __m256i w[4], pair[4], noise[4];
    philox(_mm256_add_epi32(_mm256_set1_epi32((int)(first / 4)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)), key, w);
    pair[0] = _mm256_unpacklo_epi32(w[0], w[1]), pair[1] = _mm256_unpacklo_epi32(w[2], w[3]);
    pair[2] = _mm256_unpackhi_epi32(w[0], w[1]), pair[3] = _mm256_unpackhi_epi32(w[2], w[3]);
    for (int i = 0; i < 2; i++) {
        noise[2 * i] = _mm256_unpacklo_epi64(pair[2 * i], pair[2 * i + 1]);
        noise[2 * i + 1] = _mm256_unpackhi_epi64(pair[2 * i], pair[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) { /* counters i and i + 4: columns 4 i .. and 4 i + 16 .. of the block */
        const __m256 x = _mm256_loadu2_m128(logits + 4 * i + 16, logits + 4 * i);
        const __m256i column = _mm256_add_epi32(_mm256_set1_epi32((int)first + 4 * i), _mm256_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19));
        consider(best, _mm256_add_ps(x, gumbel(noise[i])), column);
    }
}

/* 8 columns from `first` whose tokens are named. */
INLINE void consider_named(Best *best, const float *logits, int64_t first, const int32_t *ids, const Key *key) {
    const __m256i id = _mm256_loadu_si256((const __m256i *)ids), which = _mm256_and_si256(id, _mm256_set1_epi32(3));
    __m256i w[4];
    philox(_mm256_srli_epi32(id, 2), key, w);
    __m256i r = w[0];
    for (int i = 1; i < 4; i++) r = _mm256_blendv_epi8(r, w[i], _mm256_cmpeq_epi32(which, _mm256_set1_epi32(i)));
    const __m256i column = _mm256_add_epi32(_mm256_set1_epi32((int)first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    consider(best, _mm256_add_ps(_mm256_loadu_ps(logits), gumbel(r)), column);
}

INLINE void consider_plain(Best *best, const float *logits, int64_t first) {
    for (int i = 0; i < 4; i++) {
        const __m256i column = _mm256_add_epi32(_mm256_set1_epi32((int)first + 8 * i), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
        consider(best, _mm256_loadu_ps(logits + 8 * i), column);
    }
}

INLINE float block_max(const float *logits) {
    const __m256 a = _mm256_max_ps(_mm256_loadu_ps(logits), _mm256_loadu_ps(logits + 8));
    return max_lanes(_mm256_max_ps(a, _mm256_max_ps(_mm256_loadu_ps(logits + 16), _mm256_loadu_ps(logits + 24))));
}

/* Below this no column can win; -inf when nothing may be skipped. */
static float lowest_hope(const float *logits, int64_t columns) {
    float max = -INFINITY;
    for (int64_t c = 0; c < columns; c++) max = logits[c] > max ? logits[c] : max;
    return fabsf(max) < SMALL_LOGIT ? max - REACH : -INFINITY;
}

static int64_t pick(const Best *best) {
    float score[8];
    int32_t column[8];
    _mm256_storeu_ps(score, best->score);
    _mm256_storeu_si256((__m256i *)column, best->column);
    int winner = 0;
    for (int i = 1; i < 8; i++)
        if (score[i] > score[winner] || (score[i] == score[winner] && column[i] < column[winner])) winner = i;
    return score[winner] == -INFINITY ? 0 : column[winner];
}

static int64_t sample_row(const float *logits, const int64_t *token_ids, int64_t columns, int noisy, const Key *key) {
    Best best = {_mm256_set1_ps(-INFINITY), _mm256_setzero_si256()};
    const float hope = noisy ? lowest_hope(logits, columns) : -INFINITY;
    for (int64_t first = 0; first < columns; first += BLOCK) {
        const int64_t count = min_i64(BLOCK, columns - first);
        float padded[BLOCK];
        const float *x = logits + first;
        if (count < BLOCK) {
            for (int64_t i = 0; i < BLOCK; i++) padded[i] = i < count ? x[i] : -INFINITY;
            x = padded;
        }
        if (!noisy) {
            consider_plain(&best, x, first);
        } else if (block_max(x) >= hope) {
            if (!token_ids) {
                consider_block(&best, x, first, key);
                continue;
            }
            int32_t ids[BLOCK];
            for (int64_t i = 0; i < BLOCK; i++) ids[i] = i < count ? (int32_t)token_ids[first + i] : 0;
            for (int i = 0; i < BLOCK; i += 8) consider_named(&best, x + i, first + i, ids + i, key);
        }
    }
    return pick(&best);
}

typedef struct {
    const float *logits;
    const uint8_t *greedy;
    const int64_t *seed, *token_ids;
    const int32_t *sample_index, *pos;
    int64_t *ids;
    int64_t stride, ids_stride, columns;
    int purpose;
} Sample;

static void sample_rows(void *context, int64_t first, int64_t last, int worker) {
    const Sample *s = context;
    for (int64_t r = first; r < last; r++) {
        const uint64_t seed = (uint64_t)s->seed[r];
        const Key key = {(uint32_t)s->pos[r], (uint32_t)s->sample_index[r], (uint32_t)s->purpose, (uint32_t)seed, (uint32_t)(seed >> 32)};
        const int64_t *names = s->token_ids ? s->token_ids + r * s->ids_stride : NULL;
        const int64_t column = sample_row(s->logits + r * s->stride, names, s->columns, !s->greedy[r], &key);
        s->ids[r] = names ? names[column] : column;
    }
}

/* ids [rows] = token of the largest logits + noise of each row of logits [rows, columns]; the lowest column on ties, the first
 * when nothing exceeds -inf. token_ids [rows, columns] names the columns or is NULL. Noise only where greedy is 0. */
EXPORT void deepinfer_sample(const float *logits, int64_t stride, const uint8_t *greedy, const int64_t *seed, const int32_t *sample_index,
                             const int32_t *pos, int purpose, const int64_t *token_ids, int64_t ids_stride, int64_t *ids, int64_t rows,
                             int64_t columns, int threads) {
    Sample s = {logits, greedy, seed, token_ids, sample_index, pos, ids, stride, ids_stride, columns, purpose};
    deepinfer_parallel(rows, rows, sample_rows, &s, threads);
}
