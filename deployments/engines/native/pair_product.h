// What a pair of low rank adds to a product: y += factor (x down^T) up^T, all float32, in one pass over the rows of x. A row
// of y has the same bits however many rows there are. Rows of a matrix are turned into lanes, P panels of them side by side:
// of `down`, whose rows are few, a sum in lanes over its columns would be folded too often.

#pragma once

#include "activations.h"
#include "panels.h"

namespace {

constexpr int64_t kPairRows = 96;  // rows of x that a thread takes at a time
constexpr int kMostPanels = 4;
template <int P>
constexpr int kTurnedRows = kLanes == 16 ? (P == 4 ? 6 : 12) : 8 / P;  // rows of x whose sums are in registers

// Rows `first` on of a matrix whose columns 4 divides, in `panels` panels; behind its last row there is that row again.
inline void turn_rows(const Matrix& matrix, int64_t first, int panels, float* turned) {
    for (int p = 0; p < panels; ++p) {
        const PanelRows rows(matrix.data, matrix.row_bytes, first + p * kLanes, matrix.rows);
        for (int64_t k = 0; k < matrix.columns; k += 4) {
            Ints four[4];
            turn_16(rows, 4 * k, four);
            for (int i = 0; i < 4; ++i) store(turned + ((k + i) * panels + p) * kLanes, as_floats(four[i]));
        }
    }
}

// R rows of x [columns] times P panels. Without a factor, the products become the rows of y; with one, they are added to
// those of its columns that are there, `count`.
template <int R, int P>
inline void multiply_turned_tile(const float* x, int64_t x_stride, int64_t columns, const float* turned, const float* factor,
                                 float* y, int64_t y_stride, int64_t count) {
    Floats sums[R][P];
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) sums[r][p] = every_float(0);
    for (int64_t k = 0; k < columns; ++k) {
        Floats ws[P];
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p) ws[p] = load(turned + (k * P + p) * kLanes);
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
            const Floats xs = every_float(x[r * x_stride + k]);
#pragma GCC unroll 4
            for (int p = 0; p < P; ++p) sums[r][p] = add_product(xs, ws[p], sums[r][p]);
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

template <int P, int R = kTurnedRows<P>>
void multiply_turned(const float* x, int64_t x_stride, int64_t columns, const float* turned, const float* factor, int64_t m,
                     float* y, int64_t y_stride, int64_t count) {
    for (; m >= R; m -= R, x += R * x_stride, y += R * y_stride)
        multiply_turned_tile<R, P>(x, x_stride, columns, turned, factor, y, y_stride, count);
    if constexpr (R > 1)
        if (m) multiply_turned<P, R - 1>(x, x_stride, columns, turned, factor, m, y, y_stride, count);
}

// The pair of a layer, and memory for it: `down` turned, once for all rows of x, kPairRows rows of its products, and a part
// of `up` turned.
class PairProduct {
   public:
    PairProduct(const Matrix& down, const Matrix& up, char* scratch) : down_(down), up_(up) {
        inner_ = reinterpret_cast<float*>(scratch);
        turned_down_ = inner_ + kPairRows * padded_rank(down.rows);
        turned_up_ = turned_down_ + down.columns * padded_rank(down.rows);
        in_panels(down.rows, [&](int64_t first, auto panels) {
            turn_rows(down, first, panels, turned_down_ + first * down.columns);
        });
    }

    static size_t scratch_bytes(int64_t rank, int64_t columns) {
        return 4 * (padded_rank(rank) * (kPairRows + columns) + rank * kMostPanels * kLanes);
    }

    // Add to `m` rows of y, kPairRows at most.
    void add(const float* x, int64_t m, float factor, float* y) {
        const int64_t rank = down_.rows, columns = down_.columns, stride = padded_rank(rank);
        in_panels(rank, [&](int64_t first, auto panels) {
            multiply_turned<panels>(x, columns, columns, turned_down_ + first * columns, nullptr, m, inner_ + first, stride,
                                    panels * kLanes);
        });
        in_panels(up_.rows, [&](int64_t first, auto panels) {
            turn_rows(up_, first, panels, turned_up_);
            multiply_turned<panels>(inner_, stride, rank, turned_up_, &factor, m, y + first, up_.rows,
                                    std::min<int64_t>(panels * kLanes, up_.rows - first));
        });
    }

   private:
    template <int P>
    using Panels = std::integral_constant<int, P>;

    static int64_t padded_rank(int64_t rank) { return (rank + 2 * kLanes - 1) / (2 * kLanes) * 2 * kLanes; }

    // Call `work` with the first of some rows of a matrix, and the number of panels for them.
    template <class Work>
    static void in_panels(int64_t rows, const Work& work) {
        int64_t first = 0;
        for (; rows - first > 2 * kLanes; first += 4 * kLanes) work(first, Panels<4>{});
        if (rows - first > kLanes)
            work(first, Panels<2>{});
        else if (rows > first)
            work(first, Panels<1>{});
    }

    const Matrix &down_, &up_;
    float *inner_, *turned_down_, *turned_up_;
};

}  // namespace
