// Products of panels (panels.h) with any number of rows of x. A result is one sum over the groups of its row, in their
// order: y = fma(scale * dx, dot(u - bias, xq), y) - min * dx * sum(xq), with dot in integers, half by half where it has them.
// So it has the same bits however many rows x has, and wherever a panel or a chunk begins.

#pragma once

#include "activations.h"
#include "narrow_panels.h"

namespace {

constexpr int kTilePanels = 2;
static_assert(kChunkGroups % 8 == 0, "panels are unpacked by whole blocks, the largest of which has 256 elements");

// What a dot product with a group of numbers whose sum is -start begins with, since u has a bias.
template <class Format>
Ints start_of(int32_t start) {
    if constexpr (!Format::kBias) return every_int(0);
    return shift_up(every_int(start), __builtin_ctz(Format::kBias | 1 << 30));
}

// The memory of W that is unpacked next, fetched meanwhile: `count` lines with each group of a tile. (As many at once as a
// panel has would fill the processor's queue of them, which then waits for memory.)
struct GroupsAhead {
    const char *at, *end;
    int64_t count;
    void fetch() {
        if (at >= end) return;
        for (int64_t i = 0; i < count; ++i, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// R rows of x, a tile, times P panels in `num_groups` groups; sums [rows][panels][kLanes] go on at `sums`.
template <class Format, int R, int P>
void add_groups(const uint8_t* panels, int64_t num_groups, TileGroup x, float* sums, GroupsAhead& ahead) {
    constexpr int64_t kGroup = GroupStore<Format>::kBytes;
    constexpr int kParts = Format::kHasHalves ? 2 : 1, kSteps = 8 / kParts;
    Floats total[R][P];
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) total[r][p] = load(sums + (r * P + p) * kLanes);
    for (int64_t g = 0; g < num_groups; ++g) {
        const auto* scales = reinterpret_cast<const float*>(x.words + 8 * R);
        const auto* group_sums = reinterpret_cast<const float*>(x.more);
        ahead.fetch();
        for (int part = 0; part < kParts; ++part) {
            const int32_t* starts = Format::kHasHalves ? x.more + (1 + part) * R : x.words + 9 * R;
            Dot<Format::kMost, kSteps> dot[R][P];
            for (int r = 0; r < R; ++r)
                for (int p = 0; p < P; ++p) dot[r][p].begin(start_of<Format>(starts[r]));
#pragma GCC unroll 8
            for (int step = 0; step < kSteps; ++step) {
                const int64_t at = part * kSteps + step;
                Ints u[P];
                for (int p = 0; p < P; ++p) u[p] = load(panels + p * kGroup + kNumberBytes * at);
                for (int r = 0; r < R; ++r) {
                    const Ints xs = every_int(x.words[at * R + r]);
                    for (int p = 0; p < P; ++p) dot[r][p].add(step, u[p], xs);
                }
            }
            for (int p = 0; p < P; ++p) {
                const float* numbers = reinterpret_cast<const float*>(panels + p * kGroup + kByteBytes) + part * kLanes;
                const Floats scale = load(numbers);
                for (int r = 0; r < R; ++r) {
                    const Floats both = scale * every_float(scales[r]);
                    total[r][p] = add_product(both, to_floats(dot[r][p].total), total[r][p]);
                }
                if constexpr (Format::kHasMins) {
                    const Floats min = load(numbers + kParts * kLanes);
                    for (int r = 0; r < R; ++r) {
                        const float sum =
                            Format::kHasHalves ? scales[r] * static_cast<float>(-starts[r]) : group_sums[r];
                        total[r][p] = subtract_product(min, every_float(sum), total[r][p]);
                    }
                }
            }
        }
        panels += P * kGroup;
        x.words += R * kGroupWords;
        x.more += R * kMoreWords;
    }
    for (int r = 0; r < R; ++r)
        for (int p = 0; p < P; ++p) store(sums + (r * P + p) * kLanes, total[r][p]);
}

// All rows of x times P panels of `num_groups` groups from `group` on; R is the most rows of a tile.
template <class Format, int P, int R = kTileRows>
void add_tiles(const uint8_t* panels, int64_t num_groups, const Activations& x, int64_t group, float* sums,
               GroupsAhead& ahead) {
    const Tiles<kTileRows> tiles(x.turned);
    if constexpr (R > 2)
        if (tiles.most < R) return add_tiles<Format, P, R - 1>(panels, num_groups, x, group, sums, ahead);
    int64_t row = 0;
    for (int64_t i = 0; i < tiles.full; ++i, row += R, sums += R * P * kLanes)
        add_groups<Format, R, P>(panels, num_groups, TileGroup(x, row, R, group), sums, ahead);
    for (int64_t i = tiles.full; i < tiles.count; ++i, row += R - 1, sums += (R - 1) * P * kLanes)
        add_groups<Format, R - 1, P>(panels, num_groups, TileGroup(x, row, R - 1, group), sums, ahead);
}

int64_t num_groups_of(const Matrix& matrix) { return (matrix.columns + 31) / 32; }

size_t product_scratch_bytes(int64_t m) {
    return kTilePanels * (kChunkGroups * (kByteBytes + 4 * kNumberBytes) + m * 4 * kLanes);
}

// A panel's columns of y from `column` on, those that W has.
inline void store_columns(const Matrix& matrix, const Output& y, int64_t row, int64_t column, Floats sums) {
    const int64_t count = std::min<int64_t>(kLanes, matrix.rows - column);
    store_lanes(y.at, y.element, y.index(row, column), count, sums);
}

// Columns `first` to first + kLanes P of y, those that W has.
template <class Format, int P>
void multiply_panels(const Matrix& matrix, int64_t first, const Activations& x, int64_t m, const Output& y, char* scratch,
                     NextRows next) {
    constexpr int64_t kGroup = GroupStore<Format>::kBytes;
    const int64_t num_groups = num_groups_of(matrix);
    uint8_t* panels = reinterpret_cast<uint8_t*>(scratch);
    float* sums = reinterpret_cast<float*>(panels + kChunkGroups * P * kGroup);
    std::memset(sums, 0, m * P * kLanes * 4);
    PanelRows rows[P];
    for (int p = 0; p < P; ++p) {
        const int64_t there = p * kLanes;
        rows[p] = PanelRows(matrix, first + there, NextRows{next.matrix, next.row + there});
    }
    const int64_t lines = P * kLanes * matrix.row_bytes / 64, turns = Tiles<kTileRows>(m).count * num_groups;
    GroupsAhead ahead{rows[0].ahead, rows[0].ahead + 64 * lines, (lines + turns - 1) / turns};
    for (PanelRows& panel : rows) panel.ahead = nullptr;  // tiles fetch it
    for (int64_t begin = 0; begin < num_groups; begin += kChunkGroups) {
        const int64_t count = std::min(kChunkGroups, num_groups - begin);
        for (int p = 0; p < P; ++p) {
            GroupStore<Format> store{panels + p * kGroup, P * kGroup};
            Format::unpack(matrix, first + p * kLanes, rows[p], begin, count, store);
        }
        add_tiles<Format, P>(panels, count, x, begin, sums, ahead);
    }
    for (int64_t row = 0; row < m; ++row)
        for (int p = 0; p < P; ++p) {
            const Floats values = load(sums + (row * P + p) * kLanes);
            store_columns(matrix, y, row, first + p * kLanes, values);
        }
}

// Some rows of x in order, from a group on.
struct RowsOfX {
    const int8_t* q;
    const float *scale, *sum;
    const int32_t *starts, *half_starts;
    int64_t stride;
    explicit RowsOfX(const Activations& x)
        : q(x.q), scale(x.scale), sum(x.sum), starts(x.starts), half_starts(x.half_starts), stride(x.stride) {}
    // dx * sum(xq) of the group of a row, or of its half `part`.
    template <class Format>
    float sum_of(int64_t row, int part) const {
        const int64_t at = row * stride / 32;
        return Format::kHasHalves ? scale[at] * static_cast<float>(-half_starts[2 * at + part]) : sum[at];
    }
    template <class Format>
    Ints start(int64_t row, int part) const {
        const int64_t at = row * stride / 32;
        return start_of<Format>(Format::kHasHalves ? half_starts[2 * at + part] : starts[at]);
    }
};

// The groups of a panel as they come meet R rows of x, in registers: for so few, writing and reading them costs more.
template <class Format, int R>
struct GroupProduct {
    RowsOfX x;
    Floats total[R];
    explicit GroupProduct(const RowsOfX& x) : x(x) {
        for (int r = 0; r < R; ++r) total[r] = every_float(0);
    }
    __attribute__((always_inline)) void operator()(const Group& group) {
        constexpr int kParts = Format::kHasHalves ? 2 : 1, kSteps = 8 / kParts;
        // A dot product of VNNI waits for the one before it of its own sum: with one row there are two sums.
        constexpr int kSums = R == 1 && kLanes == 16 ? 2 : 1;
        const int64_t by_group = x.stride / 32;
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            Dot<Format::kMost, kSteps / kSums, R == 1> dot[R][kSums];
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < kSums; ++i)
                    dot[r][i].begin(i ? every_int(0) : x.template start<Format>(r, part));
#pragma GCC unroll 8
            for (int step = 0; step < kSteps; ++step) {
                const int at = part * kSteps + step;
                for (int r = 0; r < R; ++r)
                    dot[r][step % kSums].add(step / kSums, group.u[at], four_of(x.q + r * x.stride + 4 * at));
            }
            for (int r = 0; r < R; ++r) {
                const Ints whole = kSums == 2 ? sum(dot[r][0].total, dot[r][kSums - 1].total) : dot[r][0].total;
                const Floats both = group.scale[part] * every_float(x.scale[r * by_group]);
                total[r] = add_product(both, to_floats(whole), total[r]);
                if constexpr (Format::kHasMins)
                    total[r] = subtract_product(group.min[part], every_float(x.template sum_of<Format>(r, part)), total[r]);
            }
        }
        x.q += 32;
        x.scale += 1;
        x.sum += 1;
        x.starts += 1;
        x.half_starts += 2;
    }
};

// Columns `first` to first + kLanes of y, of R / 2 < m <= R rows of x. HAZARD: R rows are read, for which the memory of
// activations suffices (kActivationBytes); what comes of those behind the last is dropped.
template <class Format, int R>
void multiply_few(const Matrix& matrix, int64_t first, const Activations& x, int64_t m, const Output& y,
                  NextRows next) {
    PanelRows rows(matrix, first, next);
    GroupProduct<Format, R> product{RowsOfX(x)};
    Format::unpack(matrix, first, rows, 0, num_groups_of(matrix), product);
    for (int row = 0; row < m; ++row) store_columns(matrix, y, row, first, product.total[row]);
}

template <class Format>
void multiply_format(const Matrix& matrix, int64_t first, int64_t last, const Activations& x, int64_t m,
                     const Output& y, char* scratch, NextRows next) {
    const int64_t step = (m > kFewRows ? kTilePanels : 1) * kLanes;
    for (; first < last; first += step, next.row += step)
        if (m == 1)
            multiply_few<Format, 1>(matrix, first, x, m, y, next);
        else if (m == 2)
            multiply_few<Format, 2>(matrix, first, x, m, y, next);
        else if (m <= 4)
            multiply_few<Format, 4>(matrix, first, x, m, y, next);
        else if (m <= kFewRows)
            multiply_few<Format, kFewRows>(matrix, first, x, m, y, next);
        else if (last - first > kLanes)
            multiply_panels<Format, 2>(matrix, first, x, m, y, scratch, next);
        else
            multiply_panels<Format, 1>(matrix, first, x, m, y, scratch, next);
}

// y [m, rows of W] in its columns `first` to `last`, from m rows of x. `first` is a multiple of kLanes. Meanwhile as much
// memory of `next` is fetched.
void multiply_rows(const Matrix& matrix, int64_t first, int64_t last, const Activations& x, int64_t m,
                   const Output& y, char* scratch, NextRows next) {
#define BY(...) return multiply_format<__VA_ARGS__>(matrix, first, last, x, m, y, scratch, next)
    switch (matrix.type) {
        case Q4_0: BY(NibblePanel<false, false>);
        case Q4_1: BY(NibblePanel<true, false>);
        case Q5_0: BY(NibblePanel<false, true>);
        case Q5_1: BY(NibblePanel<true, true>);
        case Q8_0: BY(Q8Panel);
        case Q4_K: BY(Q45KPanel<false>);
        case Q5_K: BY(Q45KPanel<true>);
        case Q6_K: BY(Q6KPanel);
        case Q2_K: BY(Q23KPanel<false>);
        case Q3_K: BY(Q23KPanel<true>);
        case IQ4_NL: BY(TablePanel<false>);
        case IQ4_XS: BY(Iq4XsPanel);
        case MXFP4: BY(TablePanel<true>);
        case GROUP_INT8:
            if (matrix.columns % 32 || matrix.group % 32) BY(OddInt8Panel);
            BY(Int8Panel);
    }
#undef BY
}

}  // namespace
