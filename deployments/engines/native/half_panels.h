// Products of bfloat16 weights with many rows of x, by pairs of bfloat16: W and x are turned once for all products of a piece,
// so that no sum is folded by shuffles, and what is loaded of either follows what was loaded before. (Rows of x that lie
// thousands of bytes apart meet in the same sets of the first cache.)
// The bits are those of dense_product.h, whose sums of a stretch are 16: one for each pair of a group of 32 columns, folded at
// the end. Here these follow each other, each of two panels at once, and are folded in the same order as they end.

#pragma once

#include "activations.h"
#include "panels.h"

#include "dense_product.h"

namespace {

constexpr int64_t kTurningRows = 48;  // of x, from which on it pays
constexpr int64_t kStretchGroups = kStretch<uint16_t> / 32;

// The pair number `turn` of a group in the order in which sum_lanes adds them, and the reverse.
constexpr int pair_of(int turn) { return turn / 2 + turn % 2 * 8; }
constexpr int turn_of(int pair) { return pair % 8 * 2 + pair / 8; }

using HalfTiles = Tiles<kHalfTileRows>;

// Where a tile's stretch begins: pairs by turns, groups and rows.
inline uint16_t* tile_stretch(const HalfRows& x, int64_t first_row, int64_t rows, int64_t stretch) {
    return x.values + first_row * x.stride + rows * stretch * kStretch<uint16_t>;
}
inline int64_t groups_of(const HalfRows& x, int64_t stretch) {
    return std::min(kStretchGroups, x.stride / 32 - stretch * kStretchGroups);
}

// 32 elements become group `number` of a row.
inline void turn_group(const uint16_t* group, const HalfRows::Place& row, int64_t number, const HalfRows& to) {
    const int64_t stretch = number / kStretchGroups, step = 2 * groups_of(to, stretch) * row.rows;
    uint16_t* at = tile_stretch(to, row.first, row.rows, stretch) + 2 * (number % kStretchGroups * row.rows + row.place);
    for (int turn = 0; turn < 16; ++turn) std::memcpy(at + turn * step, group + 2 * pair_of(turn), 4);
}

#if defined(__AVX512VNNI__)

// Rows of x [.., columns], whose columns 16 divides, become tile number `tile`.
inline void turn_tile(const uint16_t* x, int64_t columns, int64_t tile, const HalfRows& to) {
    const HalfTiles tiles(to.turned);
    const int64_t first = tiles.first(tile), rows = tiles.rows(tile);
    const PanelRows from(x, 2 * columns, first, first + rows);
    const auto mask = static_cast<__mmask16>((1u << rows) - 1);
    for (int64_t k = 0; k < to.stride; k += 16) {
        const int64_t group = k / 32, stretch = group / kStretchGroups, step = 2 * groups_of(to, stretch) * rows;
        uint16_t* at = tile_stretch(to, first, rows, stretch) + 2 * (group % kStretchGroups) * rows;
        __m512i pairs[8] = {};
        if (k < columns) turn_32(from, 2 * k, pairs);
        for (int i = 0; i < 8; ++i) _mm512_mask_storeu_epi32(at + turn_of(k % 32 / 2 + i) * step, mask, pairs[i]);
    }
}

constexpr int kHalfPanels = 2;  // side by side
constexpr int64_t kHalfColumns = kHalfPanels * kLanes;
constexpr int kFolds = 4;  // of 16 sums
constexpr int64_t kShortStretch = 768;  // columns, up to which two turns are computed at once

// Of a turn. HAZARD: turns that lay a multiple of 4,096 bytes apart would all meet in one set of the first cache.
constexpr int64_t kTurnFloats = (kStretchGroups * kHalfPanels + 1) * kLanes;

// A stretch of rows `first` to `first + kHalfColumns` of W, by turns, groups and panels; behind the last row that row again.
inline void turn_stretch(const Matrix& matrix, int64_t first, Stretch stretch, float* turned) {
    for (int p = 0; p < kHalfPanels; ++p) {
        const PanelRows rows(matrix.data, matrix.row_bytes, first + p * kLanes, matrix.rows);
        for (int64_t k = stretch.begin; k < stretch.end; k += 16) {  // 8 pairs
            __m512i pairs[8];
            turn_32(rows, 2 * k, pairs);
            const int64_t column = k - stretch.begin;
            float* to = turned + (column / 32 * kHalfPanels + p) * kLanes;
            const int half = column % 32 / 2;
            for (int i = 0; i < 8; ++i) store(to + turn_of(half + i) * kTurnFloats, as_floats(pairs[i]));
        }
    }
}

// Memory of W that is turned next, fetched meanwhile: so many lines in each turn of a tile.
struct LinesAhead {
    const char* at;
    int64_t count;
    void fetch() {
        for (int64_t i = 0; i < count; ++i, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// N rows of x, of a tile whose rows are R, times the panels in one group of a turn.
template <int N>
__attribute__((target("avx512bf16"), always_inline)) inline void add_group(const float* w, const uint16_t* x,
                                                                           Floats (&total)[N][kHalfPanels]) {
    __m512bh ws[kHalfPanels];
#pragma GCC unroll 2
    for (int p = 0; p < kHalfPanels; ++p) ws[p] = (__m512bh)_mm512_loadu_ps(w + p * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < N; ++r) {
        float both;
        std::memcpy(&both, x + 2 * r, 4);
        const __m512bh xs = (__m512bh)_mm512_set1_ps(both);
#pragma GCC unroll 2
        for (int p = 0; p < kHalfPanels; ++p) total[r][p] = _mm512_dpbf16_ps(total[r][p], ws[p], xs);
    }
}

// N rows, from `x` on, of a tile that has R, times the panels in a stretch, which has `columns`, and turns of x so many
// `groups`. T turns are computed at once. `sums` is memory for those that wait to be folded.
template <int T, int N, int R>
__attribute__((target("avx512bf16"))) inline void multiply_half_rows(const float* turned, int64_t columns, const uint16_t* x,
                                                                     int64_t groups, bool is_first, float* to, int64_t stride,
                                                                     float* sums, LinesAhead& ahead) {
    constexpr int64_t kTile = N * kHalfPanels * kLanes;
    const int64_t x_turn = 2 * groups * R, count = columns / 32;
    for (int turn = 0; turn < 16; turn += T, turned += T * kTurnFloats, x += T * x_turn) {
        const uint16_t* at = x;
        const float* w = turned;
        ahead.fetch();
        Floats total[T][N][kHalfPanels];
#pragma GCC unroll 2
        for (int t = 0; t < T; ++t)
#pragma GCC unroll 12
            for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
                for (int p = 0; p < kHalfPanels; ++p) total[t][r][p] = _mm512_setzero_ps();
        for (int64_t g = 0; g < count; ++g, at += 2 * R, w += kHalfPanels * kLanes)
#pragma GCC unroll 2
            for (int t = 0; t < T; ++t) add_group<N>(w + t * kTurnFloats, at + t * x_turn, total[t]);
        if (columns % 32 && pair_of(turn) < 8) add_group<N>(w, at, total[0]);  // half a group has the first 8 pairs
#pragma GCC unroll 12
        for (int r = 0; T == 2 && r < N; ++r)
#pragma GCC unroll 2
            for (int p = 0; p < kHalfPanels; ++p) total[0][r][p] = total[0][r][p] + total[T - 1][r][p];
        const int folds = __builtin_ctz(~(turn / T));  // as in a binary number that counts the sums
        for (int fold = 0; fold < folds; ++fold)
#pragma GCC unroll 12
            for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
                for (int p = 0; p < kHalfPanels; ++p)
                    total[0][r][p] = load(sums + fold * kTile + (r * kHalfPanels + p) * kLanes) + total[0][r][p];
        const bool is_last = turn + T == 16;
        float* const into = is_last ? to : sums + folds * kTile;
        const int64_t by = is_last ? stride : kHalfPanels * kLanes;
        const bool adds = is_last && !is_first;
#pragma GCC unroll 12
        for (int r = 0; r < N; ++r)
#pragma GCC unroll 2
            for (int p = 0; p < kHalfPanels; ++p) {
                float* place = into + r * by + p * kLanes;
                store(place, adds ? load(place) + total[0][r][p] : total[0][r][p]);
            }
    }
}

// A tile of R rows likewise. In a short stretch the sums that wait take much of the time: there it is two turns at once, of
// one half of the rows after the other, which have as many sums.
template <int R>
void multiply_half_tile(const float* turned, int64_t columns, const uint16_t* x, int64_t groups, bool is_first, float* to,
                        int64_t stride, float* sums, LinesAhead& ahead) {
    constexpr int kFirst = (R + 1) / 2, kRest = R - kFirst;
    if (columns > kShortStretch)
        return multiply_half_rows<1, R, R>(turned, columns, x, groups, is_first, to, stride, sums, ahead);
    multiply_half_rows<2, kFirst, R>(turned, columns, x, groups, is_first, to, stride, sums, ahead);
    if constexpr (kRest > 0)
        multiply_half_rows<2, kRest, R>(turned, columns, x + 2 * kFirst, groups, is_first, to + kFirst * stride, stride, sums,
                                        ahead);
}

// All tiles of x times the panels in a stretch; R is the most rows of a tile.
template <int R = kHalfTileRows>
void multiply_half_tiles(const float* turned, Stretch stretch, const HalfRows& x, float* to, int64_t stride, float* sums,
                         LinesAhead& ahead) {
    const HalfTiles tiles(x.turned);
    if constexpr (R > kHalfTileRows / 2)
        if (tiles.most < R) return multiply_half_tiles<R - 1>(turned, stretch, x, to, stride, sums, ahead);
    const int64_t number = stretch.begin / kStretch<uint16_t>, groups = groups_of(x, number);
    const int64_t columns = stretch.end - stretch.begin;
    int64_t row = 0;
    for (int64_t i = 0; i < tiles.full; ++i, row += R)
        multiply_half_tile<R>(turned, columns, tile_stretch(x, row, R, number), groups, number == 0, to + row * stride, stride,
                              sums, ahead);
    for (int64_t i = tiles.full; i < tiles.count; ++i, row += R - 1)
        multiply_half_tile<R - 1>(turned, columns, tile_stretch(x, row, R - 1, number), groups, number == 0, to + row * stride,
                                  stride, sums, ahead);
}

inline size_t dense_scratch_bytes(const HalfRows&) { return 4 * (16 * kTurnFloats + kFolds * kHalfTileRows * kHalfColumns); }

// As multiply_dense of FloatRows. HAZARD: of turned rows, the columns of `to` up to a multiple of kHalfColumns are written.
inline void multiply_dense(const Matrix& matrix, int64_t first, int64_t last, const HalfRows& x, int64_t m, float* to,
                           int64_t stride, char* scratch) {
    if (!x.turned) return multiply_dense_rows<uint16_t>(matrix, first, last, x.values, x.stride, m, to, stride);
    float* const turned = reinterpret_cast<float*>(scratch);
    const int64_t nbytes = kHalfColumns * matrix.row_bytes;
    const int64_t stretches = (matrix.columns + kStretch<uint16_t> - 1) / kStretch<uint16_t>;
    const int64_t turns = 16 * stretches * HalfTiles(x.turned).count;
    for (; first < last; first += kHalfColumns, to += kHalfColumns) {
        LinesAhead ahead{reinterpret_cast<const char*>(matrix.data) + first * matrix.row_bytes + nbytes,
                         (nbytes / 64 + turns - 1) / turns};
        for (int64_t begin = 0; begin < matrix.columns; begin += kStretch<uint16_t>) {
            const Stretch stretch{begin, std::min(matrix.columns, begin + kStretch<uint16_t>)};
            turn_stretch(matrix, first, stretch, turned);
            multiply_half_tiles(turned, stretch, x, to, stride, turned + 16 * kTurnFloats, ahead);
        }
    }
}

#endif

inline size_t dense_scratch_bytes(const FloatRows&) { return 0; }

}  // namespace
