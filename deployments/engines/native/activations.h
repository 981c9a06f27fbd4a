// Rows of x as the kernels take them: int8 by 32 elements (absmax / 127, as llama.cpp does). Few lie row by row. Of many, the
// rows of a tile meet W at once, and lie together: group by group, and in a group four elements of each row by turns. So what
// a product loads follows what it loaded before. (Rows that lie thousands of bytes apart meet in the same sets of the cache.)

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "blocks.h"
#include "lanes.h"

namespace {

constexpr int64_t kPiece = 32;  // rows of W that a thread takes at a time
constexpr int64_t kStep = 64;  // elements of one round of the inner loop; scratch rows are padded to it with zeros

inline int64_t padded(int64_t columns) { return (columns + kStep - 1) / kStep * kStep; }

enum Element { FLOAT32 = 0, BFLOAT16 = 1 };

constexpr int kTileRows = kLanes == 16 ? 6 : 4;  // rows of x whose sums are in registers
constexpr int64_t kFewRows = kLanes == 16 ? 8 : 4;  // whose sums stay in registers while W is unpacked

// `rows` rows of x in tiles of at most MOST rows, as even as can be: `full` of `most` rows, then others of one row less.
template <int MOST>
struct Tiles {
    int count, most, full;
    explicit Tiles(int64_t rows) {
        const int all = static_cast<int>(rows);  // of a step or a block: numbers of 32 bits are divided in less time
        count = (all + MOST - 1) / MOST;
        most = MOST;
        while (count * (most - 1) >= all) --most;
        full = all - count * (most - 1);
    }
    int64_t rows(int64_t tile) const { return most - (tile >= full); }
    int64_t first(int64_t tile) const { return tile * most - std::max<int64_t>(0, tile - full); }
};

// A row's place in its tile, which begins with row `first` and has `rows`; of rows in order (`turned` is 0), one of its own.
template <int MOST>
struct TilePlace {
    int row, first, rows = 1, place = 0, last_full = -1;
    TilePlace(int64_t turned, int64_t row_) : row(static_cast<int>(row_)), first(row) {
        if (!turned) return;
        const Tiles<MOST> tiles(turned);
        last_full = tiles.full * tiles.most;
        const bool is_full = row < last_full;
        rows = tiles.most - !is_full;
        place = (is_full ? row : row - last_full) % rows;
        first = row - place;
    }
    // The place of the next row.
    void advance() {
        ++row;
        if (++place < rows) return;
        place = 0;
        first = row;
        rows -= first == last_full;
    }
};

// Rows of x as the kernels take them, padded with zeros to `stride` elements.
struct Activations {
    using Place = TilePlace<kTileRows>;
    int8_t* q;
    float* scale;  // dx, by 32 elements
    float* sum;            // dx * sum(q), by 32
    int32_t* starts;       // -sum(q), by 32
    int32_t* half_starts;  // -sum(q), by 16
    int64_t stride, turned;  // rows in tiles, or 0
};

// What a row has of a group in a tile: eight times four elements, scale and start; and, behind all groups, what only some
// formats take: the sum and two starts of halves. So many groups of all tiles lie together: a product takes them at a time.
constexpr int64_t kGroupWords = 10, kMoreWords = 3, kChunkGroups = 16;

inline float load_element(const void* at, int element, int64_t i) {
    if (element == FLOAT32) return static_cast<const float*>(at)[i];
    const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(at)[i]) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To nearest, ties to even; a NaN stays one.
inline uint16_t to_bfloat16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return static_cast<uint16_t>((value != value ? 0x7fc00000u : bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline void store_element(void* at, int element, int64_t i, float value) {
    if (element == FLOAT32)
        static_cast<float*>(at)[i] = value;
    else
        static_cast<uint16_t*>(at)[i] = to_bfloat16(value);
}

// Where a product goes: column `column` of row `row` of y at row * stride + column - first.
struct Output {
    void* at;
    int element;
    int64_t stride, first;
    int64_t index(int64_t row, int64_t column) const { return row * stride + column - first; }
};

// Per element: a byte, three numbers by 32 elements and one by 16, rounded up by so much that of m > 2 rows the numbers
// of m / 2 more may be read.
constexpr size_t kActivationBytes = 2;

void place_activations(char* memory, int64_t m, Activations& to) {
    to.turned = m > kFewRows ? m : 0;
    to.q = reinterpret_cast<int8_t*>(memory);
    to.scale = reinterpret_cast<float*>(memory + m * to.stride);
    to.sum = to.scale + m * to.stride / 32;
    to.starts = reinterpret_cast<int32_t*>(to.sum + m * to.stride / 32);
    to.half_starts = to.starts + m * to.stride / 32;
}

// Where a tile's group begins.
struct TileGroup {
    int32_t *words, *more;
    // Group number `group` of the tile of `rows` rows, from row `first` on.
    TileGroup(const Activations& x, int64_t first, int64_t rows, int64_t group) {
        const int64_t all = x.stride / 32, chunk = group / kChunkGroups * kChunkGroups;
        const int64_t groups = std::min(kChunkGroups, all - chunk);
        const int64_t before = chunk * x.turned + first * groups + (group - chunk) * rows;
        int32_t* const memory = reinterpret_cast<int32_t*>(x.q);
        words = memory + before * kGroupWords;
        more = memory + x.turned * all * kGroupWords + before * kMoreWords;
    }
};

// A group's elements are `own` (of rows in order, they are in place); its numbers, and the elements in a tile, go to theirs.
inline void put_group(const int8_t* own, float scale, const int32_t (&half_starts)[2], const Activations::Place& row,
                      int64_t group, const Activations& to) {
    const int32_t start = half_starts[0] + half_starts[1];
    const float sum = scale * static_cast<float>(-start);
    if (to.turned) {
        const TileGroup at(to, row.first, row.rows, group);
        int32_t *words = at.words + row.place, *more = at.more + row.place;
        for (int j = 0; j < 8; ++j, words += row.rows) std::memcpy(words, own + 4 * j, 4);
        std::memcpy(words, &scale, 4);
        words[row.rows] = start;
        std::memcpy(more, &sum, 4);
        for (int half = 0; half < 2; ++half) more[(1 + half) * row.rows] = half_starts[half];
        return;
    }
    const int64_t at = row.row * to.stride / 32 + group;
    to.scale[at] = scale;
    to.sum[at] = sum;
    to.starts[at] = start;
    for (int half = 0; half < 2; ++half) to.half_starts[2 * at + half] = half_starts[half];
}

#if defined(__AVX512VNNI__)

// 16 elements from `i` on, those at or behind `k` as zeros.
inline __m512 load_sixteen(const void* x, int element, int64_t i, int64_t k) {
    const __mmask16 mask = k - i >= 16 ? 0xffff : k > i ? (1u << (k - i)) - 1 : 0;
    if (element == FLOAT32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(x) + i);
    const __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x) + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// Elements `i` to `end` of x, 32 at most and perhaps none, become group number `group` of a row.
inline void prepare_group(const void* x, int element, int64_t i, int64_t end, const Activations::Place& row,
                          int64_t group, const Activations& to) {
    alignas(32) int8_t own[32];
    int32_t half_starts[2];
    int8_t* q = to.turned ? own : to.q + row.row * to.stride + 32 * group;
    const __m512 low = load_sixteen(x, element, i, end), high = load_sixteen(x, element, i + 16, end);
    // Sizes are compared as integers: infinities and NaNs are the largest. They stay visible, since the scale becomes NaN.
    const __m512i sizes[2] = {_mm512_castps_si512(_mm512_abs_ps(low)), _mm512_castps_si512(_mm512_abs_ps(high))};
    const uint32_t most_bits = _mm512_reduce_max_epu32(_mm512_max_epu32(sizes[0], sizes[1]));
    const bool is_finite = most_bits < 0x7f800000u;
    float most;
    std::memcpy(&most, &most_bits, 4);
    const __m512 inverse = _mm512_set1_ps(most > 0 && is_finite ? 127 / most : 0);
    const __m512 parts[2] = {low, high};
    for (int j = 0; j < 2; ++j) {
        const __m512i wide = is_finite ? _mm512_cvtps_epi32(_mm512_mul_ps(parts[j], inverse)) : _mm512_setzero_si512();
        const __m128i steps = _mm512_cvtsepi32_epi8(wide);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * j), steps);
        // The sum of eight bytes in each half, as if they had no sign: 128 more each.
        const __m128i sums = _mm_sad_epu8(_mm_xor_si128(steps, _mm_set1_epi8(-128)), _mm_setzero_si128());
        half_starts[j] = 16 * 128 - _mm_cvtsi128_si32(sums) - _mm_extract_epi32(sums, 2);
    }
    put_group(q, is_finite ? most / 127 : std::numeric_limits<float>::quiet_NaN(), half_starts, row, group, to);
}

// The first `count` lanes of `values`, which is between 1 and 16.
inline void store_lanes(void* at, int element, int64_t i, int64_t count, __m512 values) {
    const __mmask16 mask = (1u << count) - 1;
    if (element == FLOAT32) return _mm512_mask_storeu_ps(static_cast<float*>(at) + i, mask, values);
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i near = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    near = _mm512_mask_mov_epi32(near, _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
    const __m256i halves = _mm512_cvtepi32_epi16(_mm512_srli_epi32(near, 16));
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(at) + i, mask, halves);
}

#else

// Eight elements from `i` on, those at or behind `k` as zeros.
inline __m256 load_eight(const void* x, int element, int64_t i, int64_t k) {
    if (k - i < 8) {
        float few[8] = {};
        for (int64_t j = i; j < k; ++j) few[j - i] = load_element(x, element, j);
        return _mm256_loadu_ps(few);
    }
    if (element == FLOAT32) return _mm256_loadu_ps(static_cast<const float*>(x) + i);
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(x) + i));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

inline void prepare_group(const void* x, int element, int64_t i, int64_t end, const Activations::Place& row,
                          int64_t group, const Activations& to) {
    alignas(32) int8_t own[32];
    int32_t half_starts[2];
    int8_t* q = to.turned ? own : to.q + row.row * to.stride + 32 * group;
    __m256 parts[4];
    __m256i sizes = _mm256_setzero_si256();  // as integers: infinities and NaNs are the largest, and the scale becomes NaN
    for (int j = 0; j < 4; ++j) {
        parts[j] = load_eight(x, element, i + 8 * j, end);
        const __m256i size = _mm256_and_si256(_mm256_castps_si256(parts[j]), _mm256_set1_epi32(0x7fffffff));
        sizes = _mm256_max_epu32(sizes, size);
    }
    __m128i four = _mm_max_epu32(_mm256_castsi256_si128(sizes), _mm256_extracti128_si256(sizes, 1));
    four = _mm_max_epu32(four, _mm_shuffle_epi32(four, 0x4e));
    const uint32_t most_bits = _mm_cvtsi128_si32(_mm_max_epu32(four, _mm_shuffle_epi32(four, 0xb1)));
    const bool is_finite = most_bits < 0x7f800000u;
    float most;
    std::memcpy(&most, &most_bits, 4);
    const __m256 inverse = _mm256_set1_ps(most > 0 && is_finite ? 127 / most : 0);
    __m256i steps[4];
    for (int j = 0; j < 4; ++j)
        steps[j] = is_finite ? _mm256_cvtps_epi32(_mm256_mul_ps(parts[j], inverse)) : _mm256_setzero_si256();
    for (int j = 0; j < 2; ++j) {
        // Packing goes by halves of a register: 0 to 3, 8 to 11, 4 to 7, 12 to 15.
        const __m256i wide = _mm256_permute4x64_epi64(_mm256_packs_epi32(steps[2 * j], steps[2 * j + 1]), 0xd8);
        const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(q + 16 * j), bytes);
        // The sum of eight bytes in each half, as if they had no sign: 128 more each.
        const __m128i sums = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
        half_starts[j] = 16 * 128 - _mm_cvtsi128_si32(sums) - _mm_extract_epi32(sums, 2);
    }
    put_group(q, is_finite ? most / 127 : std::numeric_limits<float>::quiet_NaN(), half_starts, row, group, to);
}

// The first `count` lanes of `values`, which is between 1 and 8.
inline void store_lanes(void* at, int element, int64_t i, int64_t count, __m256 values) {
    float lanes[8];
    _mm256_storeu_ps(lanes, values);
    for (int64_t j = 0; j < count; ++j) store_element(at, element, i + j, lanes[j]);
}
#endif

// Row number `row` of x [.., k].
inline void prepare_row(const void* x, int element, int64_t row, int64_t k, const Activations& to) {
    const Activations::Place place(to.turned, row);
    for (int64_t i = 0; i < to.stride / 32; ++i)
        prepare_group(x, element, row * k + 32 * i, (row + 1) * k, place, i, to);
}

}  // namespace
