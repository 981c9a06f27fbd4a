// Attention of images' tokens [image, head, token, size], where every query meets all keys, by pairs of bfloat16 with sums
// in float32. Lanes are queries: a query's maximum and sum need nothing of other lanes, and heads of any size fill them.
// A word is what a lane takes at once: two elements of a vector, or an element of the values of two keys.
// Some blocks of queries meet some keys at a time, with a running maximum and sum as in attention.h, in memory that does
// not grow with the keys. A query's sums have the order of the keys, in the same steps, whatever other queries, heads and
// images there are.

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
constexpr int64_t kBlocksAtOnce = 4;  // that meet a pair of values which is put together once
constexpr int64_t kKeysAtOnce = 64;

// A thread's memory, whatever number of keys there is. What has rows has a block's queries in each.
struct AttentionScratch {
    struct Block {
        float *q, *sums;  // words of the queries, sums of values
        float *most, *total;
    } blocks[kBlocksAtOnce];
    float *scores, *factor;  // scores or shares of some keys
    uint32_t* v;             // words of their values [keys / 2][size]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, int64_t size, int64_t num_blocks) {
        char* at = memory;
        size_t used = 0;
        const auto take = [&](auto*& place, int64_t words) {
            if (memory) place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(at + used);
            used += (4 * words + 63) / 64 * 64;
        };
        for (Block* block = blocks; block < blocks + num_blocks; ++block) {
            take(block->q, size / 2 * kBlockQueries), take(block->sums, size * kBlockQueries);
            take(block->most, kBlockQueries), take(block->total, kBlockQueries);
        }
        take(scores, kKeysAtOnce * kBlockQueries), take(factor, kBlockQueries), take(v, kKeysAtOnce / 2 * size);
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
// A row's words lie `row_stride` elements apart from the next row's, its own `word_stride`.
template <int R>
__attribute__((target("avx512bf16"), always_inline)) inline void add_words(const uint16_t* w, int64_t row_stride,
                                                                           int64_t word_stride, const float* x,
                                                                           int64_t depth,
                                                                           Floats (&total)[R][kQueryVectors]) {
    for (int64_t i = 0; i < depth; ++i, w += word_stride, x += kBlockQueries) {
        Floats xs[kQueryVectors];
#pragma GCC unroll 4
        for (int v = 0; v < kQueryVectors; ++v) xs[v] = load(x + 16 * v);
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r) {
            const Ints ws = four_of(reinterpret_cast<const int8_t*>(w + r * row_stride));
#pragma GCC unroll 4
            for (int v = 0; v < kQueryVectors; ++v)
                total[r][v] = _mm512_dpbf16_ps(total[r][v], (__m512bh)xs[v], (__m512bh)ws);
        }
    }
}

// Scores of R keys, and the greatest so far.
template <int R = kRowsOfTile>
__attribute__((target("avx512bf16"))) void score_keys(const uint16_t* k, int64_t stride, int64_t words, const float* q,
                                                      int64_t keys, float* scores, float* most) {
    for (; keys >= R; keys -= R, k += R * stride, scores += R * kBlockQueries) {
        Floats total[R][kQueryVectors];
#pragma GCC unroll 6
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < kQueryVectors; ++v) total[r][v] = _mm512_setzero_ps();
        add_words<R>(k, stride, 2, q, words, total);
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
        if (keys) score_keys<R - 1>(k, stride, words, q, keys, scores, most);
}

// Add the values of some keys, by pairs, to what the queries' sums become with their factors.
template <int R = kRowsOfTile>
__attribute__((target("avx512bf16"))) void add_values(const uint16_t* v, int64_t size, const float* shares, int64_t pairs,
                                                      const float* factor, int64_t rows, float* sums) {
    for (; rows >= R; rows -= R, v += 2 * R, sums += R * kBlockQueries) {
        Floats total[R][kQueryVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kQueryVectors; ++i) {
            const Floats factors = load(factor + 16 * i);
#pragma GCC unroll 6
            for (int r = 0; r < R; ++r) total[r][i] = load(sums + r * kBlockQueries + 16 * i) * factors;
        }
        add_words<R>(v, 2, 2 * size, shares, pairs, total);
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
                                                              const AttentionScratch::Block& own, float* factors) {
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
        store(factors + v, factor);
    }
}

inline void pair_up_values(const uint16_t* v, int64_t stride, int64_t keys, int64_t size, uint32_t* to) {
    for (int64_t key = 0; key < keys; key += 2, v += 2 * stride, to += size) {
        const uint16_t* const pair[] = {v, key + 1 < keys ? v + stride : nullptr};
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask32 mask = lanes_from_to(0, size - i);
            _mm512_mask_storeu_epi32(to + i, static_cast<__mmask16>(mask), pixel_words<1>(pair, i, mask));
        }
    }
}

// Which of 16 lanes have a query, from `first` on.
inline __mmask16 queries_of(const FullAttention& a, int64_t first) {
    return static_cast<__mmask16>(lanes_from_to(0, a.queries - first));
}

inline Ints token_offsets(int64_t stride) {
    const Ints order = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_mullo_epi32(order, every_int(static_cast<int>(stride)));
}

// A block's queries from `first` on, and nothing of any key.
inline void begin_block(const FullAttention& a, int64_t image, int64_t head, int64_t first,
                        const AttentionScratch::Block& own) {
    const uint16_t* const q = a.q + a.of_q.at(image, head, first);
    const Ints offsets = token_offsets(a.of_q.token);
    for (int64_t v = 0; v < kBlockQueries; v += 16)
        for (int64_t word = 0; word < a.size / 2; ++word)
            _mm512_storeu_si512(own.q + word * kBlockQueries + v,
                                _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), queries_of(a, first + v), offsets,
                                                            q + v * a.of_q.token + 2 * word, 2));
    std::memset(own.sums, 0, 4 * a.size * kBlockQueries);
    std::memset(own.total, 0, 4 * kBlockQueries);
    std::fill(own.most, own.most + kBlockQueries, -std::numeric_limits<float>::infinity());
}

__attribute__((target("avx512bf16"))) inline void end_block(const FullAttention& a, int64_t image, int64_t head,
                                                            int64_t first, const AttentionScratch::Block& own) {
    uint16_t* const y = a.y + a.of_y.at(image, head, first);
    const Ints offsets = token_offsets(a.of_y.token);
    for (int64_t v = 0; v < kBlockQueries; v += 16) {
        const Floats total = load(own.total + v);
        for (int64_t i = 0; i < a.size; i += 2) {
            const float* sums = own.sums + i * kBlockQueries + v;
            _mm512_mask_i32scatter_epi32(y + v * a.of_y.token + i, queries_of(a, first + v), offsets,
                                         pair_up(load(sums) / total, load(sums + kBlockQueries) / total), 2);
        }
    }
}

// Some blocks of queries, from `first` on.
inline void attend_blocks(const FullAttention& a, int64_t image, int64_t head, int64_t first, int64_t num_blocks,
                          const AttentionScratch& own) {
    const float scale = static_cast<float>(a.scale * 1.4426950408889634);
    const auto each_block = [&](const auto& run) {
        for (int64_t i = 0; i < num_blocks; ++i) run(first + i * kBlockQueries, own.blocks[i]);
    };
    each_block([&](int64_t query, const auto& block) { begin_block(a, image, head, query, block); });
    for (int64_t key = 0; key < a.keys; key += kKeysAtOnce) {
        const int64_t keys = std::min(kKeysAtOnce, a.keys - key);
        pair_up_values(a.v + a.of_v.at(image, head, key), a.of_v.token, keys, a.size, own.v);
        each_block([&](int64_t, const auto& block) {
            float before[kBlockQueries];
            std::memcpy(before, block.most, sizeof before);
            score_keys(a.k + a.of_k.at(image, head, key), a.of_k.token, a.size / 2, block.q, keys, own.scores, block.most);
            soften_keys(own.scores, keys, scale, before, block, own.factor);
            add_values(reinterpret_cast<const uint16_t*>(own.v), a.size, own.scores, (keys + 1) / 2, own.factor, a.size,
                       block.sums);
        });
    }
    each_block([&](int64_t query, const auto& block) { end_block(a, image, head, query, block); });
}

inline int attend_fully(const FullAttention& a, int threads) {
    const int64_t all_blocks = divided_up(a.queries, kBlockQueries), pairs = a.images * a.heads;
    // With several threads, so few blocks at once that each of them has some.
    const int64_t most = threads == 1 ? kBlocksAtOnce : divided_up(pairs * all_blocks, 2 * threads);
    const int64_t blocks = std::clamp<int64_t>(most, 1, std::min(kBlocksAtOnce, all_blocks));
    const int64_t parts = divided_up(all_blocks, blocks);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        AttentionScratch own;
        char* memory = tile_scratch.reserve(own.place(nullptr, a.size, blocks));
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        own.place(memory, a.size, blocks);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pairs * parts; ++i) {
            const int64_t pair = i / parts, block = i % parts * blocks;
            if (memory)
                attend_blocks(a, pair / a.heads, pair % a.heads, block * kBlockQueries, std::min(blocks, all_blocks - block), own);
        }
    }
    return failed;
}

}  // namespace

#endif
