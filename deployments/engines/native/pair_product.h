// What a pair of low rank adds to a product: y += factor (x down^T) up^T, all float32, in one pass over the rows of x. A row
// of y has the same bits however many rows there are.

#pragma once

#include "turned_product.h"

namespace {

constexpr int64_t kPairRows = 96;  // rows of x that a thread takes at a time
constexpr int kMostPanels = 4;

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
