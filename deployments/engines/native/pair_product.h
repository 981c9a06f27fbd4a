// What a pair of low rank adds to a product: y += factor (x down^T) up^T, all float32, in one pass over the rows of x. A row
// of y has the same bits however many rows there are.

#pragma once

#include "activations.h"
#include "dense_product.h"
#include "panels.h"

namespace {

constexpr int64_t kPairRows = 16 * kDenseRows;  // rows of x that a thread takes at a time
constexpr int kPairPanels = kLanes == 16 ? 4 : 2;
constexpr int64_t kPairColumns = kPairPanels * kLanes;

// R rows of t [rank, of which `t_stride` floats apart] times kPairColumns rows of up, turned into lanes; added to R rows of y,
// of which `count` columns are there.
template <int R>
inline void add_pair_tile(const float* t, int64_t rank, const float* turned, float factor, float* y, int64_t y_stride,
                          int64_t count) {
    Floats sums[R][kPairPanels];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < kPairPanels; ++p) sums[r][p] = every_float(0);
    for (int64_t j = 0; j < rank; ++j) {
        Floats ups[kPairPanels];
#pragma GCC unroll 4
        for (int p = 0; p < kPairPanels; ++p) ups[p] = load(turned + (j * kPairPanels + p) * kLanes);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Floats inner = every_float(t[r * rank + j]);
#pragma GCC unroll 4
            for (int p = 0; p < kPairPanels; ++p) sums[r][p] = add_product(inner, ups[p], sums[r][p]);
        }
    }
    const Floats factors = every_float(factor);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
        float* to = y + r * y_stride;
        if (count == kPairColumns) {
#pragma GCC unroll 4
            for (int p = 0; p < kPairPanels; ++p)
                store(to + p * kLanes, add_product(factors, sums[r][p], load(to + p * kLanes)));
            continue;
        }
        float own[kPairColumns] = {};
        std::memcpy(own, to, 4 * count);
        for (int p = 0; p < kPairPanels; ++p)
            store(own + p * kLanes, add_product(factors, sums[r][p], load(own + p * kLanes)));
        std::memcpy(to, own, 4 * count);
    }
}

template <int R = kDenseRows>
void add_pair_rows(const float* t, int64_t rank, const float* turned, float factor, int64_t m, float* y, int64_t y_stride,
                   int64_t count) {
    for (; m >= R; m -= R, t += R * rank, y += R * y_stride)
        add_pair_tile<R>(t, rank, turned, factor, y, y_stride, count);
    if constexpr (R > 1)
        if (m) add_pair_rows<R - 1>(t, rank, turned, factor, m, y, y_stride, count);
}

inline size_t pair_scratch_bytes(int64_t rank) { return 4 * (kPairRows + kPairColumns) * rank; }

// `m` rows, kPairRows at most. 16 divides the columns of `down`, 4 its rows, of which there are as many as columns of `up`.
inline void add_pair(const Matrix& down, const Matrix& up, const float* x, int64_t m, float factor, float* y, char* scratch) {
    const int64_t rank = down.rows, n = up.rows;
    float *t = reinterpret_cast<float*>(scratch), *turned = t + kPairRows * rank;
    multiply_dense(down, 0, rank, FloatRows{const_cast<float*>(x), down.columns}, m, t, rank);
    for (int64_t first = 0; first < n; first += kPairColumns) {
        for (int p = 0; p < kPairPanels; ++p) {
            const PanelRows rows(up.data, up.row_bytes, first + p * kLanes, n);
            for (int64_t j = 0; j < rank; j += 4) {
                Ints four[4];
                turn_16(rows, 4 * j, four);
                for (int i = 0; i < 4; ++i) store(turned + ((j + i) * kPairPanels + p) * kLanes, as_floats(four[i]));
            }
        }
        add_pair_rows(t, rank, turned, factor, m, y + first, n, std::min(kPairColumns, n - first));
    }
}

}  // namespace
