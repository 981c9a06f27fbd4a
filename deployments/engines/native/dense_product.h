// Products of float32 or bfloat16 weights, where they lie, with any number of rows of x, in float32. A result is the sum of
// the stretches of its row of W, in order, each a sum in lanes that is folded at its end: it has the same bits however many
// rows x has, and wherever a tile begins.
// Where the processor multiplies pairs of bfloat16 (HalfRows), x is rounded to bfloat16, too, and only the sums are float32.

#pragma once

#include "activations.h"
#include "attention.h"

namespace {

constexpr int kHalfTileRows = 12;  // of x: with two panels, as many sums as leave registers for what they are made of

// Rows of x in float32, or rounded to bfloat16, padded with zeros to `stride` elements. Of bfloat16, `turned` rows may lie in
// tiles (half_panels.h); else it is 0.
template <class Element>
struct DenseRows {
    using Place = TilePlace<kHalfTileRows>;
    Element* values;
    int64_t stride, turned;
};
using FloatRows = DenseRows<float>;
using HalfRows = DenseRows<uint16_t>;

inline void put(float& to, float value) { to = value; }
inline void put(uint16_t& to, float value) { to = to_bfloat16(value); }

void turn_group(const uint16_t* group, const HalfRows::Place& row, int64_t number, const HalfRows& to);

// Elements `i` to `end` of x, 32 at most and perhaps none, become group number `group` of a row.
template <class Element>
void prepare_group(const float* x, int, int64_t i, int64_t end, const TilePlace<kHalfTileRows>& row, int64_t group,
                   const DenseRows<Element>& to) {
    Element own[32];
    Element* at = to.turned ? own : to.values + row.row * to.stride + 32 * group;
#if defined(__AVX512VNNI__)
    constexpr int element = sizeof(Element) == 2 ? BFLOAT16 : FLOAT32;
    for (int j = 0; j < 32; j += 16) store_lanes(at, element, j, 16, load_sixteen(x, FLOAT32, i + j, end));
#else
    const int64_t count = std::clamp<int64_t>(end - i, 0, 32);
    for (int64_t j = 0; j < count; ++j) put(at[j], x[i + j]);
    std::fill(at + count, at + 32, Element{0});
#endif
    if constexpr (sizeof(Element) == 2)
        if (to.turned) turn_group(own, row, group, to);
}

// Half of the lanes of a vector that has 16, added to the other half.
inline __m256 eight_lanes(Floats sums) {
#if defined(__AVX512VNNI__)
    return _mm256_add_ps(_mm512_castps512_ps256(sums), _mm512_extractf32x8_ps(sums, 1));
#else
    return sums;
#endif
}

// The sums of four vectors' lanes.
inline __m128 sum_lanes(Floats a, Floats b, Floats c, Floats d) {
    const __m256 ab = _mm256_hadd_ps(eight_lanes(a), eight_lanes(b)), cd = _mm256_hadd_ps(eight_lanes(c), eight_lanes(d));
    const __m256 all = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

// With 4 of them per row of x, as many sums as leave registers for what they are made of.
constexpr int kDenseRows = kLanes == 16 ? 6 : 3;

// Columns whose products are one sum in lanes: of so many, a tile's rows of x stay in the first cache, and a piece of W in
// the second. (Turned rows of bfloat16 take few of them at a time, and fold their sums the more seldom, the more there are.)
struct Stretch {
    int64_t begin, end;
};
template <class Element>
constexpr int64_t kStretch = sizeof(Element) == 2 ? 2048 : 768;

#if defined(__AVX512VNNI__)
// The same of two times four vectors, in fewer steps.
inline void sum_lanes(const Floats* first, const Floats* second, __m128 (&to)[2]) {
    __m512 halves[4], pairs[2];
    for (int i = 0; i < 4; ++i) {
        const Floats* const two = (i < 2 ? first : second) + i % 2 * 2;
        halves[i] = _mm512_shuffle_f32x4(two[0], two[1], 0x44) + _mm512_shuffle_f32x4(two[0], two[1], 0xee);
    }
    const auto add_neighbours = [](__m512 a, __m512 b) {
        return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd);
    };
    for (int i = 0; i < 2; ++i) pairs[i] = add_neighbours(halves[2 * i], halves[2 * i + 1]);
    const __m512 fours = add_neighbours(pairs[0], pairs[1]);
    const __m512 sums = _mm512_shuffle_f32x4(fours, fours, 0x88) + _mm512_shuffle_f32x4(fours, fours, 0xdd);
    const __m128 even = _mm512_castps512_ps128(sums), odd = _mm512_extractf32x4_ps(sums, 1);
    to[0] = _mm_unpacklo_ps(even, odd);
    to[1] = _mm_unpackhi_ps(even, odd);
}
#else
inline void sum_lanes(const Floats* first, const Floats* second, __m128 (&to)[2]) {
    to[0] = sum_lanes(first[0], first[1], first[2], first[3]);
    to[1] = sum_lanes(second[0], second[1], second[2], second[3]);
}
#endif

// Fold the sums of R rows of x and 4 Q rows of W into to[r * stride + i], or add them there behind the first stretch.
template <int R, int Q>
__attribute__((always_inline)) inline void store_sums(const Floats (&sums)[R][4 * Q], bool is_first, float* to,
                                                      int64_t stride) {
    const auto put_four = [&](int four, __m128 folded) {
        float* at = to + four / Q * stride + four % Q * 4;
        _mm_storeu_ps(at, is_first ? folded : _mm_add_ps(_mm_loadu_ps(at), folded));
    };
    const auto four_at = [&](int four) { return sums[four / Q] + four % Q * 4; };
#pragma GCC unroll 8
    for (int four = 0; four + 2 <= R * Q; four += 2) {
        __m128 folded[2];
        sum_lanes(four_at(four), four_at(four + 1), folded);
        put_four(four, folded[0]);
        put_four(four + 1, folded[1]);
    }
    if constexpr (R * Q % 2) {
        const Floats* const last = four_at(R * Q - 1);
        put_four(R * Q - 1, sum_lanes(last[0], last[1], last[2], last[3]));
    }
}

// Fetch a part of the rows of W that follow these, whose columns from `k` on are read, so many of each; `i` counts the rows.
// With few rows of x the time is that of memory, which is read fastest in the order in which it lies there: the columns of
// one row after the other. With many it is that of the second cache.
template <int R, int Q, class Weight>
inline void fetch(const Weight* const (&w)[4 * Q], int64_t k, int64_t columns, int i) {
    const Weight* const rows_ahead = w[0] + 4 * Q * (w[1] - w[0]);
    if constexpr (R < kDenseRows)
        _mm_prefetch(reinterpret_cast<const char*>(rows_ahead + 4 * Q * k + columns * i), _MM_HINT_T1);
    else
        _mm_prefetch(reinterpret_cast<const char*>(rows_ahead + (w[i] - w[0]) + k), _MM_HINT_T0);
}

// R rows of x times 4 Q rows of W in some columns, whose number 16 divides. HAZARD: without `unroll`, GCC 12 keeps the
// sums in memory, and a product takes three times as long.
template <int R, int Q, class Weight>
inline void multiply_dense_tile(const Weight* const (&w)[4 * Q], Stretch stretch, const float* x, int64_t x_stride,
                                float* to, int64_t stride) {
    Floats sums[R][4 * Q];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < 4 * Q; ++i) sums[r][i] = every_float(0);
    for (int64_t k = stretch.begin; k < stretch.end; k += kLanes) {
        Floats xs[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = load(x + r * x_stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < 4 * Q; ++i) {
            const Floats ws = load(w[i] + k);
            fetch<R, Q>(w, k, kLanes, i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][i] = add_product(ws, xs[r], sums[r][i]);
        }
    }
    store_sums<R, Q>(sums, stretch.begin == 0, to, stride);
}

#if defined(__AVX512VNNI__)
inline bool has_half_products() { return __builtin_cpu_supports("avx512bf16"); }

// The same of bfloat16, 32 columns at a time. HAZARD: the processor takes numbers below 2^-126 for zeros here.
template <int R, int Q>
__attribute__((target("avx512bf16"))) inline void multiply_dense_tile(const uint16_t* const (&w)[4 * Q], Stretch stretch,
                                                                      const uint16_t* x, int64_t x_stride, float* to,
                                                                      int64_t stride) {
    Floats sums[R][4 * Q];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
        for (int i = 0; i < 4 * Q; ++i) sums[r][i] = _mm512_setzero_ps();
    for (int64_t k = stretch.begin; k < stretch.end; k += 32) {
        const __mmask32 mask = stretch.end - k >= 32 ? ~0u : 0xffffu;
        __m512bh xs[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) xs[r] = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + r * x_stride + k);
#pragma GCC unroll 8
        for (int i = 0; i < 4 * Q; ++i) {
            const __m512bh ws = (__m512bh)_mm512_maskz_loadu_epi16(mask, w[i] + k);
            fetch<R, Q>(w, k, 32, i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], ws, xs[r]);
        }
    }
    store_sums<R, Q>(sums, stretch.begin == 0, to, stride);
}
#endif

// `m` rows of x times rows `first` to `last` of W, in the columns of some whole stretches. A single row of x meets 8 rows of
// W at once: each addition waits for the one before it of its own sum.
template <class Weight, class Element, int R = kDenseRows>
void multiply_dense_stretches(const Matrix& matrix, int64_t first, int64_t last, Stretch stretches, const Element* x,
                              int64_t x_stride, int64_t m, float* to, int64_t stride) {
    constexpr int kQuads = R == 1 ? 2 : 1, kRows = 4 * kQuads;
    const auto row_of = [&](int64_t row) { return reinterpret_cast<const Weight*>(matrix.data + row * matrix.row_bytes); };
    for (; m >= R; m -= R, x += R * x_stride, to += R * stride)
        for (int64_t at = first; at < last; at += kRows) {
            const bool is_whole = at + kRows <= last;
            const Weight* w[kRows];
            for (int i = 0; i < kRows; ++i) w[i] = row_of(std::min(at + i, last - 1));
            float own[R * kRows];
            float* into = is_whole ? to + at - first : own;
            const int64_t by = is_whole ? stride : kRows;
            if (!is_whole && stretches.begin)
                for (int r = 0; r < R; ++r) std::memcpy(own + r * kRows, to + r * stride + at - first, 4 * (last - at));
            for (int64_t begin = stretches.begin; begin < stretches.end; begin += kStretch<Element>) {
                const Stretch stretch{begin, std::min(stretches.end, begin + kStretch<Element>)};
                multiply_dense_tile<R, kQuads>(w, stretch, x, x_stride, into, by);
            }
            if (!is_whole)
                for (int r = 0; r < R; ++r) std::memcpy(to + r * stride + at - first, own + r * kRows, 4 * (last - at));
        }
    if constexpr (R > 1)
        if (m) multiply_dense_stretches<Weight, Element, R - 1>(matrix, first, last, stretches, x, x_stride, m, to, stride);
}

// `m` rows of x times rows `first` to `last` of W. For few rows of x, W is read row by row; for many, stretch by stretch,
// each from the second cache but for the first time.
template <class Weight, class Element>
void multiply_dense_rows(const Matrix& matrix, int64_t first, int64_t last, const Element* x, int64_t x_stride, int64_t m,
                         float* to, int64_t stride) {
    const int64_t columns = matrix.columns, step = m > kDenseRows ? kStretch<Element> : columns;
    for (int64_t begin = 0; begin < columns; begin += step) {
        const Stretch stretches{begin, std::min(columns, begin + step)};
        multiply_dense_stretches<Weight, Element>(matrix, first, last, stretches, x, x_stride, m, to, stride);
    }
}

inline bool is_dense(const Matrix& matrix) { return matrix.type == F32 || matrix.type == BF16; }

inline void multiply_dense(const Matrix& matrix, int64_t first, int64_t last, const FloatRows& x, int64_t m, float* to,
                           int64_t stride, char*) {
    const auto multiply = matrix.type == F32 ? multiply_dense_rows<float, float> : multiply_dense_rows<uint16_t, float>;
    multiply(matrix, first, last, x.values, x.stride, m, to, stride);
}

}  // namespace
