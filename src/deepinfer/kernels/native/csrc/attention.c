/* Causal attention over paged keys and values.
 *
 * For each query (token and head) keys are taken in tiles of 32 counted from absolute key 0, in ascending order, with
 * an online softmax (Milakov and Gimelshein, arXiv 1805.02867): scores of the tile, new maximum, weights
 * 2^(s - max), then acc and sum are rescaled and extended. A query's operations depend on its own keys only, so a token
 * gives the same bits alone, in a chunk or in a prefill. What is shared is memory traffic: a tile of keys and values
 * (16 KiB at D = 64) stays in the first-level cache while the queries of up to 8 tokens and all heads of the group use it.
 * For each tile scores, weights and values are three loops over the queries: within a loop the queries are independent, so
 * the latencies of one (maximum, power, chain of sums) hide behind the others.
 *
 * Scores: 8 keys at a time, lanes along D, keys read where they lie in the page: per 8 elements of D that is 9 loads and 8
 * FMA, and one tree of shuffles turns the 8 accumulators into 8 scores. No transposed copy is needed, which would
 * cost as much as the scores of two queries. Values: 64 outputs in 8 registers, per key one broadcast and 8 FMA from memory.
 */
#include "kernels.h"

enum { TILE = 32, MAX_QUERIES = 32, MAX_TOKENS = 8, MAX_HEADS = 16, MAX_DIM = 256 };

typedef struct {
    const float *q;
    const void *k_pool, *v_pool;
    const int32_t *page_table, *slot_ids, *pos;
    float *out;
    int64_t q_stride, table_stride, heads, kv_heads, dim, page_tokens;
    int type;
    float scale; /* times log2(e) */
} Attention;

/* A piece of work: tokens first .. first + count of one row by heads h0 .. h1; several tokens only with one kv head. */
typedef struct {
    int32_t row, first, count, h0, h1;
} Item;

/* One tile of keys and values of a kv head; past `count` the pointers repeat the first key, so that reads are legal. */
typedef struct {
    const float *k[TILE], *v[TILE];
    int64_t first, count;
} Tile;

/* Running softmax of the queries of one work item. */
typedef struct {
    float acc[MAX_QUERIES * MAX_DIM] __attribute__((aligned(64))); /* [queries][dim] */
    float max[MAX_QUERIES], sum[MAX_QUERIES], shrink[MAX_QUERIES]; /* shrink: of this tile */
    float weights[MAX_QUERIES][TILE] __attribute__((aligned(64)));  /* scores, then weights of this tile */
    float k_copy[TILE][MAX_DIM], v_copy[TILE][MAX_DIM]; /* used when the pool is 16 bits wide */
} State;

static void unpack_line(const void *pool, int64_t at, int type, int64_t dim, float *out) {
    for (int64_t d = 0; d < dim; d += 8) _mm256_storeu_ps(out + d, load_as_f32(pool, at + d, type));
}

/* Asks for the tile after this one; pages are scattered and a key of one head is short, so the hardware cannot guess. */
static void prefetch_tile(const Attention *a, int64_t slot, int64_t kv_head, int64_t first, int64_t end) {
    const int32_t *pages = a->page_table + slot * a->table_stride;
    const int64_t bytes = a->dim * (int64_t)type_size(a->type);
    for (int64_t j = first; j < min_i64(first + TILE, end); j++) {
        const int64_t line = pages[j / a->page_tokens] * a->page_tokens + j % a->page_tokens;
        const int64_t at = (line * a->kv_heads + kv_head) * bytes;
        for (int64_t b = 0; b < bytes; b += 64) {
            _mm_prefetch((const char *)a->k_pool + at + b, _MM_HINT_T0);
            _mm_prefetch((const char *)a->v_pool + at + b, _MM_HINT_T0);
        }
    }
}

static void find_tile(const Attention *a, int64_t slot, int64_t kv_head, int64_t first, int64_t end, Tile *tile, State *state) {
    const int32_t *pages = a->page_table + slot * a->table_stride;
    tile->first = first;
    tile->count = min_i64(TILE, end - first);
    int64_t page = first / a->page_tokens, line = first % a->page_tokens;
    for (int64_t j = 0; j < tile->count; j++) {
        const int64_t at = ((pages[page] * a->page_tokens + line) * a->kv_heads + kv_head) * a->dim;
        if (a->type == TYPE_F32) {
            tile->k[j] = (const float *)a->k_pool + at;
            tile->v[j] = (const float *)a->v_pool + at;
        } else {
            unpack_line(a->k_pool, at, a->type, a->dim, state->k_copy[j]);
            unpack_line(a->v_pool, at, a->type, a->dim, state->v_copy[j]);
            tile->k[j] = state->k_copy[j];
            tile->v[j] = state->v_copy[j];
        }
        if (++line == a->page_tokens) line = 0, page++;
    }
    for (int64_t j = tile->count; j < TILE; j++) tile->k[j] = tile->k[0];
}

/* Sums of the lanes of eight vectors, one a lane. */
INLINE __m256 sum_each(const __m256 *v) {
    __m256 pair[4], four[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        pair[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm256_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m256d x = _mm256_castps_pd(pair[2 * i]), y = _mm256_castps_pd(pair[2 * i + 1]);
        four[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20), _mm256_permute2f128_ps(four[0], four[1], 0x31));
}

INLINE __m256 dot_eight(const float *q, const float *const *k, int64_t dim) {
    __m256 acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) acc[i] = _mm256_setzero_ps();
    for (int64_t d = 0; d < dim; d += 8) {
        const __m256 v = _mm256_loadu_ps(q + d);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) acc[i] = _mm256_fmadd_ps(v, _mm256_loadu_ps(k[i] + d), acc[i]);
    }
    return sum_each(acc);
}

/* Scores of the first `valid` keys of the tile, -inf up to the next multiple of 8. */
INLINE void tile_scores(const float *q, const Tile *tile, int64_t valid, int64_t dim, float scale, float *scores) {
    for (int i = 0; i < valid; i += 8) {
        const __m256i lane = _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(i));
        const __m256 inside = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32((int)valid), lane));
        const __m256 score = _mm256_mul_ps(dot_eight(q, tile->k + i, dim), _mm256_set1_ps(scale));
        _mm256_store_ps(scores + i, _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), score, inside));
    }
}

static void scores_64(const float *q, const Tile *tile, int64_t valid, float scale, float *scores) {
    tile_scores(q, tile, valid, 64, scale, scores);
}

static void scores_any(const float *q, const Tile *tile, int64_t valid, int64_t dim, float scale, float *scores) {
    tile_scores(q, tile, valid, dim, scale, scores);
}

/* Scores become weights under the new maximum; `shrink` is the factor for what was summed under the old one. */
static void tile_weights(State *state, int query, int64_t valid) {
    float *scores = state->weights[query];
    __m256 top = _mm256_set1_ps(-INFINITY), total = _mm256_setzero_ps();
    for (int i = 0; i < valid; i += 8) top = _mm256_max_ps(top, _mm256_load_ps(scores + i));
    const float old = state->max[query], tile_max = max_lanes(top), max = tile_max > old ? tile_max : old;
    const __m256 shrink = exp2_ps(_mm256_set1_ps(old - max));
    state->shrink[query] = max > old ? _mm256_cvtss_f32(shrink) : 1.0f;
    state->max[query] = max;
    for (int i = 0; i < valid; i += 8) {
        const __m256 w = exp2_ps(_mm256_sub_ps(_mm256_load_ps(scores + i), _mm256_set1_ps(max)));
        _mm256_store_ps(scores + i, w);
        total = _mm256_add_ps(total, w);
    }
    state->sum[query] = state->sum[query] * state->shrink[query] + sum_lanes(total);
}

/* acc[0 .. 8 n) = acc * shrink + sum over keys of weight * value, keys ascending. */
INLINE void add_values(float *acc, const float *const *v, int64_t offset, const float *weights, int64_t valid, float shrink, int n) {
    __m256 a[8];
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) a[i] = _mm256_mul_ps(_mm256_loadu_ps(acc + 8 * i), _mm256_set1_ps(shrink));
    for (int64_t j = 0; j < valid; j++) {
        const __m256 w = _mm256_broadcast_ss(weights + j);
        const float *value = v[j] + offset;
#pragma GCC unroll 8
        for (int i = 0; i < n; i++) a[i] = _mm256_fmadd_ps(w, _mm256_loadu_ps(value + 8 * i), a[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) _mm256_storeu_ps(acc + 8 * i, a[i]);
}

static void tile_values(const Tile *tile, int64_t valid, int64_t dim, State *state, int query) {
    float *acc = state->acc + query * dim;
    const float *weights = state->weights[query], shrink = state->shrink[query];
    int64_t d = 0;
    for (; d + 64 <= dim; d += 64) add_values(acc + d, tile->v, d, weights, valid, shrink, 8);
    for (; d < dim; d += 8) add_values(acc + d, tile->v, d, weights, valid, shrink, 1);
}

static void finish(const Attention *a, const State *state, int query, int64_t token, int64_t head) {
    float *out = a->out + (token * a->heads + head) * a->dim;
    const __m256 inverse = _mm256_set1_ps(state->sum[query] == 0.0f ? 0.0f : 1.0f / state->sum[query]);
    for (int64_t d = 0; d < a->dim; d += 8) _mm256_storeu_ps(out + d, _mm256_mul_ps(_mm256_loadu_ps(state->acc + query * a->dim + d), inverse));
}

/* One tile of one kv head by the item's heads h0 .. h1 that read it. */
static void tile_by_queries(const Attention *a, const Item *item, int64_t h0, int64_t h1, const Tile *tile, State *state) {
    const int64_t stride = item->h1 - item->h0;
    int64_t valid[MAX_TOKENS] = {0};
    int first_token = 0;
    for (int t = 0; t < item->count; t++) valid[t] = min_i64(tile->count, a->pos[item->first + t] + 1 - tile->first);
    while (valid[first_token] <= 0) first_token++;
    for (int t = first_token; t < item->count; t++)
        for (int64_t h = h0; h < h1; h++) {
            const float *q = a->q + (item->first + t) * a->q_stride + h * a->dim;
            float *scores = state->weights[t * stride + h - item->h0];
            if (a->dim == 64)
                scores_64(q, tile, valid[t], a->scale, scores);
            else
                scores_any(q, tile, valid[t], a->dim, a->scale, scores);
        }
    for (int t = first_token; t < item->count; t++)
        for (int64_t h = h0; h < h1; h++) tile_weights(state, (int)(t * stride + h - item->h0), valid[t]);
    for (int t = first_token; t < item->count; t++)
        for (int64_t h = h0; h < h1; h++) tile_values(tile, valid[t], a->dim, state, (int)(t * stride + h - item->h0));
}

static void work(const Attention *a, const Item *item, State *state) {
    const int64_t group = a->heads / a->kv_heads, num_heads = item->h1 - item->h0;
    const int64_t slot = a->slot_ids[item->row], end = a->pos[item->first + item->count - 1] + 1;
    memset(state->acc, 0, item->count * num_heads * a->dim * sizeof(float));
    for (int i = 0; i < item->count * num_heads; i++) {
        state->max[i] = -INFINITY;
        state->sum[i] = 0.0f;
    }
    for (int64_t first = 0; first < end; first += TILE)
        for (int64_t h = item->h0; h < item->h1;) {
            const int64_t kv_head = h / group, last = min_i64((kv_head + 1) * group, item->h1);
            Tile tile;
            find_tile(a, slot, kv_head, first, end, &tile, state);
            if (item->count == 1) prefetch_tile(a, slot, kv_head, first + TILE, end);
            tile_by_queries(a, item, h, last, &tile, state);
            h = last;
        }
    for (int t = 0; t < item->count; t++)
        for (int64_t h = item->h0; h < item->h1; h++)
            finish(a, state, (int)(t * num_heads + h - item->h0), item->first + t, h);
}

/* Cuts the rows into items and returns how many; items NULL only counts. Single tokens take as many heads as fit, so
 * that the heads of a key, neighbours in memory, are read together; several tokens take the heads of one kv head. With few
 * tokens the heads are dealt out among the threads. */
static int64_t cut(const Attention *a, const int32_t *cu_q, int64_t rows, int threads, Item *items) {
    const int64_t group = a->heads / a->kv_heads, fair = ceil_div(cu_q[rows] * a->heads, threads);
    const int64_t block_tokens = min_i64(MAX_TOKENS, MAX_QUERIES / min_i64(group, MAX_HEADS));
    int64_t count = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = cu_q[r]; t < cu_q[r + 1]; t += block_tokens) {
            const int64_t tokens = min_i64(block_tokens, cu_q[r + 1] - t);
            const int64_t most = min_i64(fair, tokens == 1 ? MAX_QUERIES : min_i64(group, MAX_HEADS));
            for (int64_t h0 = 0, h1; h0 < a->heads; h0 = h1, count++) {
                h1 = min_i64(h0 + most, tokens == 1 ? a->heads : (h0 / group + 1) * group);
                if (items) items[count] = (Item){(int32_t)r, (int32_t)t, (int32_t)tokens, (int32_t)h0, (int32_t)h1};
            }
        }
    return count;
}

typedef struct {
    const Attention *a;
    const Item *last;
    State *states;
} Items;

static void some_items(void *context, int64_t first, int64_t last, int worker) {
    const Items *all = context;
    for (int64_t i = first; i < last; i++) work(all->a, all->last - i, all->states + worker);
}

/* q [tokens, heads, dim] (token stride q_stride) over pools [pages, page_tokens, kv_heads, dim] of `type` -> out
 * [tokens, heads, dim]; token t of row r sees keys 0 .. pos[t]. dim is a multiple of 8, at most 256. Tokens that belong to
 * no row become 0. Returns 0, or -1 when there is no memory. */
EXPORT int deepinfer_attention(const float *q, int64_t q_stride, const void *k_pool, const void *v_pool, int type, const int32_t *page_table,
                               int64_t table_stride, const int32_t *slot_ids, const int32_t *cu_q, const int32_t *pos, float *out, int64_t tokens,
                               int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t page_tokens, float scale, int threads) {
    const Attention a = {q, k_pool, v_pool, page_table, slot_ids, pos, out, q_stride, table_stride, heads, kv_heads, dim, page_tokens, type,
                         scale * 1.44269504f};
    const int64_t count = cut(&a, cu_q, rows, threads, NULL);
    if (cu_q[rows] < tokens) memset(out + cu_q[rows] * heads * dim, 0, (tokens - cu_q[rows]) * heads * dim * sizeof(float));
    if (!count) return 0;
    Item *items = malloc(count * sizeof(Item));
    State *states = aligned_scratch(threads * sizeof(State));
    if (!items || !states) {
        free(items);
        free(states);
        return -1;
    }
    cut(&a, cu_q, rows, threads, items);
    /* Backwards: later tokens of a prefill see more keys, and the longest work should not come last. */
    Items all = {&a, items + count - 1, states};
    deepinfer_parallel(count, count, some_items, &all, threads);
    free(items);
    free(states);
    return 0;
}
