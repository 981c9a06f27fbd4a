// Products of rows of W that are turned into lanes, P panels of them side by side, with rows of x: a result is one sum over its
// columns in their order, so it has the same bits however many rows of x there are. A word is what a lane takes at once: a
// float32, or a pair of bfloat16 where the processor multiplies these.

#pragma once

#include "activations.h"
#include "panels.h"

namespace {

#if defined(__AVX512VNNI__)
#define WITH_HALF_PRODUCTS __attribute__((target("avx512bf16")))
#else
#define WITH_HALF_PRODUCTS
#endif

template <int P>
constexpr int kTurnedRows = kLanes == 16 ? (P == 4 ? 6 : 12) : 8 / P;  // rows of x whose sums are in registers

// Columns of a panel from `k` on, `step` floats from one to the next; returns how many.
inline int64_t turn_columns(const PanelRows& rows, int64_t k, int64_t columns, float* to, int64_t step) {
#if defined(__AVX512VNNI__)
    if (columns - k >= 16) {
        __m512 in[16], pairs[16];
        __m512d fours[16];
        for (int i = 0; i < 16; ++i) in[i] = _mm512_loadu_ps(rows.at[i] + 4 * k);
        for (int i = 0; i < 16; i += 2) {
            pairs[i] = _mm512_unpacklo_ps(in[i], in[i + 1]);
            pairs[i + 1] = _mm512_unpackhi_ps(in[i], in[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)  // number i + j has column 4 l + j of four rows in its quarter l
            for (int j = 0; j < 2; ++j) {
                const __m512d low = _mm512_castps_pd(pairs[i + j]), high = _mm512_castps_pd(pairs[i + 2 + j]);
                fours[i + 2 * j] = _mm512_unpacklo_pd(low, high);
                fours[i + 2 * j + 1] = _mm512_unpackhi_pd(low, high);
            }
        for (int j = 0; j < 4; ++j) {
            const __m512d even[2] = {_mm512_shuffle_f64x2(fours[j], fours[4 + j], 0x88),
                                     _mm512_shuffle_f64x2(fours[8 + j], fours[12 + j], 0x88)};
            const __m512d odd[2] = {_mm512_shuffle_f64x2(fours[j], fours[4 + j], 0xdd),
                                    _mm512_shuffle_f64x2(fours[8 + j], fours[12 + j], 0xdd)};
            const auto put_column = [&](int column, __m512d values) { _mm512_storeu_pd(to + column * step, values); };
            put_column(j, _mm512_shuffle_f64x2(even[0], even[1], 0x88));
            put_column(4 + j, _mm512_shuffle_f64x2(odd[0], odd[1], 0x88));
            put_column(8 + j, _mm512_shuffle_f64x2(even[0], even[1], 0xdd));
            put_column(12 + j, _mm512_shuffle_f64x2(odd[0], odd[1], 0xdd));
        }
        return 16;
    }
#endif
    Ints four[4];
    turn_16(rows, 4 * k, four);
    for (int i = 0; i < 4; ++i) store(to + i * step, as_floats(four[i]));
    return 4;
}

// Rows `first` on of a matrix of words whose columns 4 divides, in `panels` panels; behind its last row there is that row
// again. Meanwhile as much memory of `next` is fetched, if there is one.
inline void turn_rows(const Matrix& matrix, int64_t first, int panels, float* turned, const NextRows* next = nullptr) {
    for (int p = 0; p < panels; ++p) {
        const int64_t there = p * kLanes, step = panels * kLanes;
        PanelRows rows(matrix.data, matrix.row_bytes, first + there, matrix.rows);
        if (next) rows = PanelRows(matrix, first + there, NextRows{next->matrix, next->row + there});
        for (int64_t k = 0, count; k < matrix.columns; k += count) {
            count = turn_columns(rows, k, matrix.columns, turned + k * step + there, step);
            count == 16 ? rows.fetch<64>() : rows.fetch<16>();
        }
    }
}

// a b + c, or of both numbers of the words.
template <class Element>
WITH_HALF_PRODUCTS __attribute__((always_inline)) inline Floats add_words(Floats a, Floats b, Floats c) {
#if defined(__AVX512VNNI__)
    if constexpr (sizeof(Element) == 2) return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b);
#endif
    return add_product(a, b, c);
}

// R rows of x [words] times P panels. Without a factor, the products become the rows of y; with one, they are added to those
// of its columns that are there, `count`.
template <int R, int P, class Element>
WITH_HALF_PRODUCTS inline void multiply_turned_tile(const Element* x, int64_t x_stride, int64_t words, const float* turned,
                                                    const float* factor, float* y, int64_t y_stride, int64_t count) {
    Floats sums[R][P];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = every_float(0);
    for (int64_t k = 0; k < words; ++k) {
        Floats ws[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) ws[p] = load(turned + (k * P + p) * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            float word;
            std::memcpy(&word, x + r * x_stride + k * (4 / sizeof(Element)), 4);
            const Floats xs = every_float(word);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = add_words<Element>(xs, ws[p], sums[r][p]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
        float *to = y + r * y_stride, own[P * kLanes] = {};
        const bool is_whole = count == P * kLanes;
        if (!is_whole) std::memcpy(own, to, 4 * count);
        float* at = is_whole ? to : own;
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
            store(at + p * kLanes, factor ? add_product(every_float(*factor), sums[r][p], load(at + p * kLanes)) : sums[r][p]);
        if (!is_whole) std::memcpy(to, own, 4 * count);
    }
}

// R is the most rows of a tile.
template <int P, class Element, int R = kTurnedRows<P>>
void multiply_turned(const Element* x, int64_t x_stride, int64_t words, const float* turned, const float* factor, int64_t m,
                     float* y, int64_t y_stride, int64_t count) {
    const Tiles<kTurnedRows<P>> tiles(m);
    if constexpr (R > 1) {
        if (tiles.most < R)
            return multiply_turned<P, Element, R - 1>(x, x_stride, words, turned, factor, m, y, y_stride, count);
        for (int64_t tile = tiles.full; tile < tiles.count; ++tile) {
            const int64_t row = tiles.first(tile);
            multiply_turned_tile<R - 1, P>(x + row * x_stride, x_stride, words, turned, factor, y + row * y_stride, y_stride,
                                           count);
        }
    }
    for (int64_t row = 0; row < tiles.full * R; row += R)
        multiply_turned_tile<R, P>(x + row * x_stride, x_stride, words, turned, factor, y + row * y_stride, y_stride, count);
}

}  // namespace
