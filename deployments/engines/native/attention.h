// Attention over the blocks of the paged KV cache where they lie, of completions and of prompts.
//
// A piece of work is a tile: some tokens of one sequence that follow each other, with the query heads of one key/value
// head. All of its queries meet 64 keys at a time, which are made float32 and turned once for all of them, and keep a
// running maximum and sum (online softmax: Milakov and Gimelshein 2018; tiles: Dao et al. 2022, FlashAttention).
// A query's sums run in the order of its own keys, from the first one on in steps of 64, so they have the same bits
// whatever other tokens the tile has, and however a prompt is cut.

#pragma once

#include <limits>

#include "exponential.h"
#include "panels.h"

namespace {

constexpr int kInt8 = 2, kFloat16 = 3;  // of the cache alone; FLOAT32 and BFLOAT16 are those of activations
constexpr int64_t kKeys = 64;
constexpr int64_t kQueries = 128;  // of a tile, where several tokens are there

constexpr int kColumnVectors = kLanes == 16 ? 4 : 2;
constexpr int kRowsAtOnce = 6;

// C [R, V vectors] += A [R, depth] B [depth, V vectors], each sum in the order of the depth. A's elements lie `a_step` apart.
template <int R, int V>
void add_block(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, float* c,
               int64_t c_stride, int64_t a_step) {
    Floats sum[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r][v] = load(c + r * c_stride + v * kLanes);
    for (int64_t k = 0; k < depth; ++k) {
        Floats bs[V];
        for (int v = 0; v < V; ++v) bs[v] = load(b + k * b_stride + v * kLanes);
        for (int r = 0; r < R; ++r) {
            const Floats as = every_float(a[r * a_stride + k * a_step]);
            for (int v = 0; v < V; ++v) sum[r][v] = add_product(as, bs[v], sum[r][v]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, sum[r][v]);
}

template <int V, int R = kRowsAtOnce>
void add_rows_of(const float* a, int64_t a_stride, int64_t rows, const float* b, int64_t b_stride, int64_t depth, float* c,
                 int64_t c_stride, int64_t a_step) {
    for (; rows >= R; rows -= R, a += R * a_stride, c += R * c_stride)
        add_block<R, V>(a, a_stride, b, b_stride, depth, c, c_stride, a_step);
    if constexpr (R > 1)
        if (rows) add_rows_of<V, R - 1>(a, a_stride, rows, b, b_stride, depth, c, c_stride, a_step);
}

// A matrix whose rows lie `stride` elements apart.
struct Strided {
    float* at;
    int64_t stride;
};

// C [rows, columns] += A [rows, depth] B [depth, columns]; 16 divides the columns.
template <int V = kColumnVectors>
void add_matrix(const float* a, int64_t a_stride, int64_t rows, Strided b, int64_t columns, int64_t depth, Strided c,
                int64_t a_step = 1) {
    for (; columns >= V * kLanes; columns -= V * kLanes, b.at += V * kLanes, c.at += V * kLanes)
        add_rows_of<V>(a, a_stride, rows, b.at, b.stride, depth, c.at, c.stride, a_step);
    if constexpr (V > 1)
        if (columns) add_matrix<V - 1>(a, a_stride, rows, b, columns, depth, c, a_step);
}

// Keys and values of one layer's cache.
struct Slots {
    void *keys, *values;                  // [slots, kv heads, head_dim]
    uint16_t *key_scales, *value_scales;  // of an int8 cache, in float16: [slots, kv heads]
};

struct CacheShape {
    int64_t num_kv_heads, head_dim, block_size;
    int element;
};

// Tokens of one sequence that follow each other: rows of the step from `first_row` on, the first of them at `position`.
struct Span {
    int64_t first_row, num_rows, position;
    const int64_t* blocks;  // of the sequence, from its first token on
    int64_t vector_of(const CacheShape& cache, int64_t token, int64_t kv_head) const {
        const int64_t slot = blocks[token / cache.block_size] * cache.block_size + token % cache.block_size;
        return slot * cache.num_kv_heads + kv_head;
    }
};

// Vector number `row` of the cache, as float32. Int8 are kv_cache.py's: `scales` has one for each vector.
inline void load_vector(const void* from, const uint16_t* scales, int element, int64_t row, int64_t size, float* to) {
    if (element == FLOAT32) {
        std::memcpy(to, static_cast<const float*>(from) + row * size, 4 * size);
        return;
    }
    if (element == kInt8) {
        const int8_t* steps = static_cast<const int8_t*>(from) + row * size;
        const float scale = _cvtsh_ss(scales[row]);
        for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(steps[i]) * scale;
        return;
    }
    const uint16_t* bits = static_cast<const uint16_t*>(from) + row * size;
    if (element == kFloat16) {
        for (int64_t i = 0; i < size; i += 8)
            _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bits + i))));
        return;
    }
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
        std::memcpy(to + i, &wide, 4);
    }
}

inline void store_vector(void* to, uint16_t* scales, int element, int64_t row, int64_t size, const float* from) {
    if (element == kFloat16) {
        uint16_t* bits = static_cast<uint16_t*>(to) + row * size;
        const __m256 most = _mm256_set1_ps(65504.0f), least = _mm256_set1_ps(-65504.0f);
        for (int64_t i = 0; i < size; i += 8) {
            // What is beyond float16 becomes its greatest number; a NaN, the second of two, stays one.
            const __m256 values = _mm256_max_ps(least, _mm256_min_ps(most, _mm256_loadu_ps(from + i)));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(bits + i), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
        }
        return;
    }
    if (element != kInt8) {
        for (int64_t i = 0; i < size; ++i) store_element(to, element, row * size + i, from[i]);
        return;
    }
    float most = 0;
    for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(from[i]));
    scales[row] = _cvtss_sh(std::min(most / 127.0f, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
    const float scale = _cvtsh_ss(scales[row]);
    int8_t* steps = static_cast<int8_t*>(to) + row * size;
    for (int64_t i = 0; i < size; ++i) {
        const float step = scale > 0 ? std::nearbyint(from[i] / scale) : 0.0f;
        steps[i] = static_cast<int8_t>(std::min(std::max(step, -127.0f), 127.0f));
    }
}

// Rows [16, size] as columns: to[i * kKeys] has element i of all 16. 16 divides the size.
inline void turn_rows(const float* from, int64_t size, float* to) {
    for (int first = 0; first < 16; first += kLanes) {
        const PanelRows rows(from, 4 * size, first, 16);
        for (int64_t i = 0; i < size; i += 8) {
            Ints eight[8];
            turn_32(rows, 4 * i, eight);
            for (int j = 0; j < 8; ++j) store(to + (i + j) * kKeys + first, as_floats(eight[j]));
        }
    }
}

// The memory of a thread for the tiles of a step.
struct TileScratch {
    float *queries, *sums;  // [queries, head_dim]
    float *scores;          // [queries, kKeys]
    float *keys, *values;   // [head_dim, kKeys] and [kKeys, head_dim]
    float *rows;            // [16, head_dim]
    float *most, *total;    // [queries]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, int64_t queries_, int64_t size) {
        float* at = reinterpret_cast<float*>(memory);
        size_t used = 0;
        for (const auto& [place, count] : {std::pair{&queries, queries_ * size}, {&sums, queries_ * size},
                                           {&scores, queries_ * kKeys}, {&keys, size * kKeys}, {&values, kKeys * size},
                                           {&rows, 16 * size}, {&most, queries_}, {&total, queries_}}) {
            if (memory) *place = at + used;
            used += (count + 15) / 16 * 16;
        }
        return used * 4;
    }
};

// Keys and values of tokens `begin` to begin + count, at most kKeys of them; what is behind them becomes zeros.
inline void load_keys(const CacheShape& cache, const Slots& slots, const Span& span, int64_t kv_head, int64_t begin,
                      int64_t count, const TileScratch& own) {
    const int64_t size = cache.head_dim;
    for (int64_t first = 0; first < kKeys; first += 16) {
        for (int64_t t = first; t < first + 16; ++t) {
            float *key = own.rows + (t - first) * size, *value = own.values + t * size;
            if (t < count) {
                const int64_t row = span.vector_of(cache, begin + t, kv_head);
                load_vector(slots.keys, slots.key_scales, cache.element, row, size, key);
                load_vector(slots.values, slots.value_scales, cache.element, row, size, value);
            } else {
                std::memset(key, 0, 4 * size);
                std::memset(value, 0, 4 * size);
            }
        }
        turn_rows(own.rows, size, own.keys + first);
    }
}

constexpr int kSixteen = 16 / kLanes;  // registers of 16 lanes

struct Greatest {
    __m128 operator()(__m128 a, __m128 b) const { return _mm_max_ps(a, b); }
    __m256 operator()(__m256 a, __m256 b) const { return _mm256_max_ps(a, b); }
#if defined(__AVX512VNNI__)
    __m512 operator()(__m512 a, __m512 b) const { return _mm512_max_ps(a, b); }
#endif
};

// One number of 16 lanes, halves first: the order that a sum has on every processor.
template <class Operation>
inline float fold(const Floats (&lanes)[kSixteen], const Operation& operation) {
#if defined(__AVX512VNNI__)
    const __m256 eight = operation(_mm512_castps512_ps256(lanes[0]), _mm512_extractf32x8_ps(lanes[0], 1));
#else
    const __m256 eight = operation(lanes[0], lanes[1]);
#endif
    const __m128 four = operation(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = operation(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(operation(two, _mm_movehdup_ps(two)));
}

// One query's scores of kKeys keys, of which it sees `count`, become shares beside the greatest score so far.
inline void soften(float* scores, int64_t count, float& most, float& total, float* sums, int64_t size) {
    for (int64_t t = count; t < kKeys; ++t) scores[t] = -std::numeric_limits<float>::infinity();
    Floats tops[kSixteen], shares[kSixteen];
    for (int i = 0; i < kSixteen; ++i) tops[i] = load(scores + i * kLanes);
    for (int64_t t = 16; t < kKeys; t += 16)
        for (int i = 0; i < kSixteen; ++i) tops[i] = Greatest()(tops[i], load(scores + t + i * kLanes));
    const float newest = fold(tops, Greatest()), top = newest > most ? newest : most;
    if (top > most) {
        const float factor = exponential(most - top);
        total *= factor;
        for (int64_t i = 0; i < size; ++i) sums[i] *= factor;
        most = top;
    }
    for (int64_t t = 0; t < kKeys; ++t) scores[t] = exponential(scores[t] - top);
    for (int i = 0; i < kSixteen; ++i) shares[i] = every_float(0);
    for (int64_t t = 0; t < kKeys; t += 16)
        for (int i = 0; i < kSixteen; ++i) shares[i] = shares[i] + load(scores + t + i * kLanes);
    total += fold(shares, [](auto a, auto b) { return a + b; });
}

// The sums of shares and values of all queries of a tile, `group` for each of its tokens: own.queries, which have the
// factor 1 / sqrt(head_dim) in them, become own.sums, to be divided by own.total.
void attend(const CacheShape& cache, const Slots& slots, const Span& tile, int64_t kv_head, int64_t group,
            const TileScratch& own) {
    const int64_t size = cache.head_dim, length = tile.position + tile.num_rows, all = tile.num_rows * group;
    std::memset(own.sums, 0, 4 * all * size);
    std::fill(own.most, own.most + all, -std::numeric_limits<float>::infinity());
    std::fill(own.total, own.total + all, 0.0f);
    for (int64_t begin = 0; begin < length; begin += kKeys) {
        const int64_t count = std::min(kKeys, length - begin);
        // Tokens before the first of these keys see none of them.
        const int64_t first_row = std::max<int64_t>(0, begin - tile.position), first = first_row * group;
        load_keys(cache, slots, tile, kv_head, begin, count, own);
        float* scores = own.scores + first * kKeys;
        std::memset(scores, 0, 4 * (all - first) * kKeys);
        add_matrix(own.queries + first * size, size, all - first, {own.keys, kKeys}, kKeys, size, {scores, kKeys});
        for (int64_t i = first; i < all; ++i) {
            const int64_t seen = std::min(count, tile.position + i / group + 1 - begin);
            soften(own.scores + i * kKeys, seen, own.most[i], own.total[i], own.sums + i * size, size);
        }
        add_matrix(scores, kKeys, all - first, {own.values, size}, size, count, {own.sums + first * size, size});
    }
}

}  // namespace
