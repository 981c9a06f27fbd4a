// Attention of images' tokens [image, head, token, size], where every query meets all keys, by pairs of bfloat16 with sums
// in float32. Lanes are queries: a query's maximum and sum need nothing of other lanes, and heads of any size fill them.
// A word is what a lane takes at once: two elements of a vector, or an element of the values of two keys.
// A block of queries meets some keys at a time, with a running maximum and sum as in attention.h. A query's sums have the
// order of the keys, in the same steps, whatever other queries, heads and images there are.

#pragma once

#include <limits>

#include "convolution.h"

namespace {

// Elements from one to the next of a tensor's images, heads and tokens; a token's elements follow each other.
struct TokenStrides {
    int64_t image, head, token;
    int64_t at(int64_t image_, int64_t head_, int64_t token_) const { return image_ * image + head_ * head + token_ * token; }
};

// The size is even.
struct FullAttention {
    const uint16_t *q, *k, *v;
    uint16_t* y;
    TokenStrides of_q, of_k, of_v, of_y;
    int64_t images, heads, queries, keys, size;
    double scale;
};

}  // namespace

#if defined(__AVX512VNNI__)

namespace {

constexpr int kQueryVectors = 4, kRowsOfTile = 6;  // as many sums as leave registers for what they are made of
constexpr int64_t kBlockQueries = 16 * kQueryVectors;
constexpr int64_t kKeysAtOnce = 64;

// A thread's memory.
struct AttentionScratch {
    float *q, *scores, *sums;  // words of the queries, scores or shares of some keys, and sums of values: rows of a block's
    float *most, *total, *factor;
    uint32_t *k, *v;  // words of all keys [keys][size / 2], and of their values [keys / 2][size]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, int64_t keys, int64_t size) {
        char* at = memory;
        size_t used = 0;
        const auto take = [&](auto*& place, int64_t words) {
            if (memory) place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(at + used);
            used += (4 * words + 63) / 64 * 64;
        };
        take(q, size / 2 * kBlockQueries), take(scores, kKeysAtOnce * kBlockQueries), take(sums, size * kBlockQueries);
        take(most, kBlockQueries), take(total, kBlockQueries), take(factor, kBlockQueries);
        take(k, keys * size / 2), take(v, (keys + 1) / 2 * size);
        return used;
    }
};

// 2^x, to 3 millionths; 0 of minus infinity.
inline __attribute__((always_inline)) Floats power_of_two(Floats x) {
    const Floats r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats p = every_float(1.34267e-2f);
    p = add_product(p, r, every_float(5.224244e-2f));
    p = add_product(p, r, every_float(2.4128023e-1f));
    p = add_product(p, r, every_float(6.9304484e-1f));
    p = add_product(p, r, every_float(1.0f));
    return _mm512_scalef_ps(p, x);
}

// Rows [R] of a block's queries: the sum over `depth` words of w[row][word] and the queries' own, x [depth][kBlockQueries].
// A row's words lie `row_stride` apart from the next row's, its own `word_stride`.
template <int R>
__attribute__((target("avx512bf16"), always_inline)) inline void add_words(const uint32_t* w, int64_t row_stride,
                                                                           int64_t word_stride, const float* x,
                                                                           int64_t depth,
                                                                           Floats (&total)[R][kQueryVectors]) {
    for (int64_t i = 0; i < depth; ++i, w += word_stride, x += kBlockQueries) {
        Floats xs[kQueryVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kQueryVectors; ++v) xs[v] = load(x + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const Ints ws = every_int(static_cast<int>(w[r * row_stride]));
#pragma GCC unroll 4
            for (int v = 0; v < kQueryVectors; ++v)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)xs[v], (__m512bh)ws);
        }
    }
}

// Scores of R keys, and the greatest so far.
template <int R = kRowsOfTile>
__attribute__((target("avx512bf16"))) void score_keys(const uint32_t* k, int64_t words, const float* q, int64_t keys,
                                                      float* scores, float* most) {
    for (; keys >= R; keys -= R, k += R * words, scores += R * kBlockQueries) {
        Floats total[R][kQueryVectors];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kQueryVectors; ++v) total[r][v] = _mm512_setzero_ps();
        add_words<R>(k, words, 1, q, words, total);
#pragma GCC unroll 4
        for (int v = 0; v < kQueryVectors; ++v) {
            Floats top = load(most + 16 * v);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) {
                store(scores + r * kBlockQueries + 16 * v, total[r][v]);
                top = _mm512_max_ps(top, total[r][v]);
            }
            store(most + 16 * v, top);
        }
    }
    if constexpr (R > 1)
        if (keys) score_keys<R - 1>(k, words, q, keys, scores, most);
}

// Add the values of some keys, by pairs, to what the queries' sums become with their factors.
template <int R = kRowsOfTile>
__attribute__((target("avx512bf16"))) void add_values(const uint32_t* v, int64_t size, const float* shares, int64_t pairs,
                                                      const float* factor, int64_t rows, float* sums) {
    for (; rows >= R; rows -= R, v += R, sums += R * kBlockQueries) {
        Floats total[R][kQueryVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kQueryVectors; ++i) {
            const Floats factors = load(factor + 16 * i);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) total[r][i] = load(sums + r * kBlockQueries + 16 * i) * factors;
        }
        add_words<R>(v, 1, size, shares, pairs, total);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int i = 0; i < kQueryVectors; ++i) store(sums + r * kBlockQueries + 16 * i, total[r][i]);
    }
    if constexpr (R > 1)
        if (rows) add_values<R - 1>(v, size, shares, pairs, factor, rows, sums);
}

// Words of two rows of elements: of the first the low halves.
inline __attribute__((target("avx512bf16"), always_inline)) Ints pair_up(Floats first, Floats second) {
    const auto both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    const Ints order = _mm512_setr_epi32(16 << 16, 17 << 16 | 1, 18 << 16 | 2, 19 << 16 | 3, 20 << 16 | 4, 21 << 16 | 5,
                                         22 << 16 | 6, 23 << 16 | 7, 24 << 16 | 8, 25 << 16 | 9, 26 << 16 | 10, 27 << 16 | 11,
                                         28 << 16 | 12, 29 << 16 | 13, 30 << 16 | 14, 31 << 16 | 15);
    return _mm512_permutexvar_epi16(order, both);
}

// Scores of some keys become shares beside the greatest score, where they lie: a pair's words in the place of its first.
__attribute__((target("avx512bf16"))) inline void soften_keys(float* scores, int64_t keys, float scale, const float* before,
                                                              const AttentionScratch& own) {
    const Floats scales = every_float(scale);
    for (int v = 0; v < kBlockQueries; v += 16) {
        const Floats top = load(own.most + v);
        const Floats factor = power_of_two((load(before + v) - top) * scales);
        Floats total = load(own.total + v) * factor;
        float *from = scores + v, *to = scores + v;
        for (int64_t key = 0; key < keys; key += 2, from += 2 * kBlockQueries, to += kBlockQueries) {
            const Floats first = power_of_two((load(from) - top) * scales);
            const Floats second = key + 1 < keys
                                      ? power_of_two((load(from + kBlockQueries) - top) * scales)
                                      : _mm512_setzero_ps();
            total = total + (first + second);
            _mm512_storeu_si512(to, pair_up(first, second));
        }
        store(own.total + v, total);
        store(own.factor + v, factor);
    }
}

inline void pack_keys(const FullAttention& a, int64_t image, int64_t head, const AttentionScratch& own) {
    const uint16_t *k = a.k + a.of_k.at(image, head, 0), *v = a.v + a.of_v.at(image, head, 0);
    for (int64_t key = 0; key < a.keys; ++key) std::memcpy(own.k + key * (a.size / 2), k + key * a.of_k.token, 2 * a.size);
    for (int64_t key = 0; key < a.keys; key += 2) {
        const uint16_t *first = v + key * a.of_v.token, *second = first + a.of_v.token;
        uint32_t* to = own.v + key / 2 * a.size;
        for (int64_t i = 0; i < a.size; ++i) to[i] = first[i] | (key + 1 < a.keys ? uint32_t{second[i]} << 16 : 0);
    }
}

inline Ints token_offsets(int64_t stride) {
    const Ints order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(order, every_int(static_cast<int>(stride)));
}

// The queries of a block, from `first` on.
__attribute__((target("avx512bf16"))) inline void attend_block(const FullAttention& a, int64_t image, int64_t head,
                                                               int64_t first, const AttentionScratch& own) {
    const int64_t count = std::min(kBlockQueries, a.queries - first), words = a.size / 2;
    const auto lanes_of = [&](int64_t v) { return static_cast<__mmask16>(lanes_from_to(0, count - v)); };
    const uint16_t* const q = a.q + a.of_q.at(image, head, first);
    const Ints q_offsets = token_offsets(a.of_q.token), y_offsets = token_offsets(a.of_y.token);
    for (int64_t v = 0; v < kBlockQueries; v += 16)
        for (int64_t word = 0; word < words; ++word)
            _mm512_storeu_si512(own.q + word * kBlockQueries + v,
                                _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), lanes_of(v), q_offsets,
                                                            q + v * a.of_q.token + 2 * word, 2));
    std::memset(own.sums, 0, 4 * a.size * kBlockQueries);
    std::memset(own.total, 0, 4 * kBlockQueries);
    std::fill(own.most, own.most + kBlockQueries, -std::numeric_limits<float>::infinity());
    const float scale = static_cast<float>(a.scale * 1.4426950408889634);
    float before[kBlockQueries];
    for (int64_t key = 0; key < a.keys; key += kKeysAtOnce) {
        const int64_t keys = std::min(kKeysAtOnce, a.keys - key);
        std::memcpy(before, own.most, sizeof before);
        score_keys(own.k + key * words, words, own.q, keys, own.scores, own.most);
        soften_keys(own.scores, keys, scale, before, own);
        add_values(own.v + key / 2 * a.size, a.size, own.scores, (keys + 1) / 2, own.factor, a.size, own.sums);
    }
    uint16_t* const y = a.y + a.of_y.at(image, head, first);
    for (int64_t v = 0; v < kBlockQueries; v += 16) {
        const Floats total = load(own.total + v);
        for (int64_t i = 0; i < a.size; i += 2) {
            const float* sums = own.sums + i * kBlockQueries + v;
            _mm512_mask_i32scatter_epi32(y + v * a.of_y.token + i, lanes_of(v), y_offsets,
                                         pair_up(load(sums) / total, load(sums + kBlockQueries) / total), 2);
        }
    }
}

inline int attend_fully(const FullAttention& a, int threads) {
    const int64_t blocks = divided_up(a.queries, kBlockQueries);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        AttentionScratch own;
        char* memory = tile_scratch.reserve(own.place(nullptr, a.keys, a.size));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        own.place(memory, a.keys, a.size);
        int64_t packed = -1;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < a.images * a.heads * blocks; ++i) {
            const int64_t pair = i / blocks, image = pair / a.heads, head = pair % a.heads;
            if (!memory) continue;
            if (packed != pair) pack_keys(a, image, head, own);
            packed = pair;
            attend_block(a, image, head, i % blocks * kBlockQueries, own);
        }
    }
    return failed;
}

}  // namespace

#endif
