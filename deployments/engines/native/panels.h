// Packed rows side by side: as many rows of W as a register has lanes are a panel, whose lanes are the columns of y.
//
// A group is 32 elements of each row of a panel: eight registers of bytes u (four consecutive elements of a row in a lane),
// then scales, then minima where the format has them: w = scale * (u - bias) - min. Rows are turned into lanes as they lie
// in the file, 4 bytes at a time, and unpacked there: lane by lane, so all rows take their scales at once.

#pragma once

#include <algorithm>

#include "blocks.h"
#include "lanes.h"

namespace {

constexpr int kNumberBytes = 4 * kLanes;
constexpr int kByteBytes = 8 * kNumberBytes;  // of a group

// What a thread multiplies next, whose memory is fetched meanwhile.
struct NextRows {
    const Matrix* matrix;
    int64_t row;
};

// Where the rows of a panel begin (behind the last row of W there is that row again), and the panel that comes next.
struct PanelRows {
    const uint8_t* at[kLanes];
    const char *ahead = nullptr, *scales_ahead = nullptr;
    PanelRows() = default;
    PanelRows(const Matrix& m, int64_t first, const NextRows& next) : PanelRows(m.data, m.row_bytes, first, m.rows) {
        const Matrix& then = *next.matrix;
        const int64_t row = std::min(next.row, then.rows);
        ahead = reinterpret_cast<const char*>(then.data + row * then.row_bytes);
        scales_ahead = reinterpret_cast<const char*>(then.scales ? then.scales + row * then.columns / then.group : nullptr);
    }
    PanelRows(const void* rows, int64_t row_bytes, int64_t first, int64_t num_rows) {
        for (int i = 0; i < kLanes; ++i)
            at[i] = static_cast<const uint8_t*>(rows) + std::min(first + i, num_rows - 1) * row_bytes;
    }
    // Each read of the rows fetches as much of that panel, in the order in which it lies in memory.
    template <int ROW_BYTES>
    void fetch() {
        if (!ahead) return;
        for (int line = 0; line < kLanes * ROW_BYTES; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T1);
        ahead += kLanes * ROW_BYTES;
    }
    // Likewise of scales that lie elsewhere, of which a group has `nbytes`.
    void fetch_scales(int64_t nbytes) {
        const char* end = scales_ahead + nbytes;
        for (; scales_ahead < end; scales_ahead += 64) _mm_prefetch(scales_ahead, _MM_HINT_T1);
    }
};

#if defined(__AVX512VNNI__)

// 16 bytes of each row, from `offset` on: lane r of out[j] is dword j of row r.
inline void turn_16(const PanelRows& rows, int64_t offset, __m512i (&out)[4]) {
    __m512i in[4];
    for (int i = 0; i < 4; ++i) {
        const auto row = [&](int number) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at[number] + offset));
        };
        in[i] = _mm512_castsi128_si512(row(i));
        in[i] = _mm512_inserti32x4(in[i], row(4 + i), 1);
        in[i] = _mm512_inserti32x4(in[i], row(8 + i), 2);
        in[i] = _mm512_inserti32x4(in[i], row(12 + i), 3);
    }
    const __m512i low01 = _mm512_unpacklo_epi32(in[0], in[1]), high01 = _mm512_unpackhi_epi32(in[0], in[1]);
    const __m512i low23 = _mm512_unpacklo_epi32(in[2], in[3]), high23 = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(low01, low23);
    out[1] = _mm512_unpackhi_epi64(low01, low23);
    out[2] = _mm512_unpacklo_epi64(high01, high23);
    out[3] = _mm512_unpackhi_epi64(high01, high23);
}

// 32 bytes of each row likewise.
inline void turn_32(const PanelRows& rows, int64_t offset, __m512i (&out)[8]) {
    __m512i half[2][4];
    for (int part = 0; part < 2; ++part) {
        __m512i in[4];
        for (int i = 0; i < 4; ++i) {
            const int row = 8 * part + i;
            const auto load = [&](int number) {
                return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.at[number] + offset));
            };
            in[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load(row)), load(row + 4), 1);
        }
        const __m512i low01 = _mm512_unpacklo_epi32(in[0], in[1]), high01 = _mm512_unpackhi_epi32(in[0], in[1]);
        const __m512i low23 = _mm512_unpacklo_epi32(in[2], in[3]), high23 = _mm512_unpackhi_epi32(in[2], in[3]);
        half[part][0] = _mm512_unpacklo_epi64(low01, low23);
        half[part][1] = _mm512_unpackhi_epi64(low01, low23);
        half[part][2] = _mm512_unpacklo_epi64(high01, high23);
        half[part][3] = _mm512_unpackhi_epi64(high01, high23);
    }
    for (int j = 0; j < 4; ++j) {
        out[j] = _mm512_shuffle_i32x4(half[0][j], half[1][j], 0x88);
        out[4 + j] = _mm512_shuffle_i32x4(half[0][j], half[1][j], 0xdd);
    }
}

// The f16 at `offset` of each row, behind which there are at least two bytes more of it.
inline Floats turn_half(const PanelRows& rows, int64_t offset) {
    __m128i four[4];
    for (int i = 0; i < 4; ++i) {
        const auto at = [&](int row) { return _mm_loadu_si32(rows.at[4 * i + row] + offset); };
        four[i] = _mm_unpacklo_epi32(_mm_unpacklo_epi16(at(0), at(1)), _mm_unpacklo_epi16(at(2), at(3)));
    }
    const __m128i low = _mm_unpacklo_epi64(four[0], four[1]), high = _mm_unpacklo_epi64(four[2], four[3]);
    return _mm512_cvtph_ps(_mm256_set_m128i(high, low));
}

// The 32 bits at `offset` of each row.
inline Ints turn_word(const PanelRows& rows, int64_t offset) {
    const auto at = [&](int row) { return static_cast<int>(word(rows.at[row] + offset)); };
    return _mm512_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7), at(8), at(9), at(10), at(11), at(12),
                             at(13), at(14), at(15));
}

#else

inline void turn_16(const PanelRows& rows, int64_t offset, __m256i (&out)[4]) {
    __m256i in[4];
    for (int i = 0; i < 4; ++i) {
        const auto row = [&](int number) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at[number] + offset));
        };
        in[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(4 + i), 1);
    }
    const __m256i low01 = _mm256_unpacklo_epi32(in[0], in[1]), high01 = _mm256_unpackhi_epi32(in[0], in[1]);
    const __m256i low23 = _mm256_unpacklo_epi32(in[2], in[3]), high23 = _mm256_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm256_unpacklo_epi64(low01, low23);
    out[1] = _mm256_unpackhi_epi64(low01, low23);
    out[2] = _mm256_unpacklo_epi64(high01, high23);
    out[3] = _mm256_unpackhi_epi64(high01, high23);
}

inline void turn_32(const PanelRows& rows, int64_t offset, __m256i (&out)[8]) {
    for (int part = 0; part < 2; ++part) {
        __m256i half[4];
        turn_16(rows, offset + 16 * part, half);
        for (int j = 0; j < 4; ++j) out[4 * part + j] = half[j];
    }
}

inline Floats turn_half(const PanelRows& rows, int64_t offset) {
    __m128i two[4];
    for (int i = 0; i < 4; ++i) {
        const auto at = [&](int row) { return _mm_loadu_si32(rows.at[2 * i + row] + offset); };
        two[i] = _mm_unpacklo_epi16(at(0), at(1));
    }
    const __m128i low = _mm_unpacklo_epi32(two[0], two[1]), high = _mm_unpacklo_epi32(two[2], two[3]);
    return _mm256_cvtph_ps(_mm_unpacklo_epi64(low, high));
}

inline Ints turn_word(const PanelRows& rows, int64_t offset) {
    const auto at = [&](int row) { return static_cast<int>(word(rows.at[row] + offset)); };
    return _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
}

#endif

// What a format's `unpack` gives its sink: a group's bytes, its scale and, if it has one, its minimum, or two of its halves.
struct Group {
    Ints u[8];
    Floats scale[2], min[2];
};

// Memory for groups that many rows of x will meet, beside those of the panels that meet them at once, `by` bytes further on.
template <class Format>
struct GroupStore {
    static constexpr int64_t kBytes = kByteBytes + kNumberBytes * (1 + Format::kHasMins) * (1 + Format::kHasHalves);
    uint8_t* to;
    int64_t by;
    void operator()(const Group& group) {
        for (int j = 0; j < 8; ++j) store(to + kNumberBytes * j, group.u[j]);
        float* numbers = reinterpret_cast<float*>(to + kByteBytes);
        store(numbers, group.scale[0]);
        if constexpr (Format::kHasHalves) store(numbers + kLanes, group.scale[1]);
        constexpr int kParts = 1 + Format::kHasHalves;
        for (int part = 0; Format::kHasMins && part < kParts; ++part)
            store(numbers + (kParts + part) * kLanes, group.min[part]);
        to += by;
    }
};

// A format says its bias (0 or a power of two) and its greatest byte (255: int8, see from_signed), what a group has, and
// unpacks `count` groups from `first` on.
struct Q8Panel {
    static constexpr int kBias = kSignedBias, kMost = 255;
    static constexpr bool kHasMins = false, kHasHalves = false;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t g = first; g < first + count; ++g) {
            rows.fetch<34>();
            Group group;
            turn_32(rows, 34 * g + 2, group.u);
            for (Ints& u : group.u) u = from_signed(u);
            group.scale[0] = turn_half(rows, 34 * g);
            sink(group);
        }
    }
};

// Q4_0, Q4_1, Q5_0, Q5_1: 32 elements in 16 bytes of nibbles, the low ones first, perhaps with 32 fifth bits before them.
template <bool HAS_MINS, bool IS_Q5>
struct NibblePanel {
    static constexpr int kBias = HAS_MINS ? 0 : IS_Q5 ? 16 : 8, kMost = IS_Q5 ? 31 : 15;
    static constexpr bool kHasMins = HAS_MINS, kHasHalves = false;
    static constexpr int kHigh = HAS_MINS ? 4 : 2, kBytes = kHigh + (IS_Q5 ? 4 : 0) + 16;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t g = first; g < first + count; ++g) {
            rows.fetch<kBytes>();
            const int64_t at = kBytes * g;
            Ints words[4];
            Group group;
            turn_16(rows, at + kBytes - 16, words);
            for (int j = 0; j < 4; ++j) {
                group.u[j] = low_nibbles(words[j]);
                group.u[4 + j] = high_nibbles(words[j]);
            }
            if constexpr (IS_Q5) {
                const Ints bits = turn_word(rows, at + kHigh);
                for (int j = 0; j < 8; ++j) {
                    const Ints four = shift_down(bits, 4 * j) & every_int(15);
                    const Ints spread = product(four, every_int(0x00204081));  // bit i to byte i
                    const Ints fifth = spread & every_byte(1);
                    group.u[j] = group.u[j] | shift_up(fifth, 4);
                }
            }
            if constexpr (HAS_MINS) {
                const Ints pair = turn_word(rows, at);
                group.scale[0] = low_half(pair);
                group.min[0] = every_float(0) - high_half(pair);
            } else {
                group.scale[0] = turn_half(rows, at);
            }
            sink(group);
        }
    }
};

// Q4_K, Q5_K: 256 elements; d, dmin, eight 6-bit pairs, the fifth bits of Q5_K, nibbles of two groups in 32 bytes.
template <bool IS_Q5>
struct Q45KPanel {
    static constexpr int kBias = 0, kMost = IS_Q5 ? 31 : 15, kBytes = IS_Q5 ? 176 : 144;
    static constexpr bool kHasMins = true, kHasHalves = false;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t at = first / 8 * kBytes; at < (first + count) / 8 * kBytes; at += kBytes) {
            Ints head[4], fifth[8];
            turn_16(rows, at, head);
            // Scales of the first four groups, of the last four, and minima likewise: four bytes of 6 bits in a lane.
            const auto bits = [&](Ints from, int mask) { return from & every_int(mask); };
            const auto upper = [&](Ints low, Ints high) {
                return bits(low, 0x0f0f0f0f) | bits(shift_down(high, 2), 0x30303030);
            };
            const Ints scales[2] = {bits(head[1], 0x3f3f3f3f), upper(head[3], head[1])};
            const Ints mins[2] = {bits(head[2], 0x3f3f3f3f), upper(shift_down(head[3], 4), head[2])};
            // A byte is taken where it is, at 256 to the power of its place: d and dmin are divided by that, exactly.
            const Floats d = low_half(head[0]), dmin = high_half(head[0]);
            if constexpr (IS_Q5) turn_32(rows, at + 16, fifth);
            const auto set_scales = [&](int i, Group& group) {
                const float divisor = 1.0f / static_cast<float>(1 << 8 * (i % 4));
                const auto number = [&](Ints from, Floats factor) {
                    const Floats byte = to_floats(bits(from, 255 << 8 * (i % 4)));
                    return factor * every_float(divisor) * byte;
                };
                group.scale[0] = number(scales[i / 4], d);
                group.min[0] = number(mins[i / 4], dmin);
            };
#pragma GCC unroll 4
            for (int i = 0; i < 8; i += 2) {
                rows.fetch<kBytes / 4>();
                Ints words[8];
                turn_32(rows, at + (IS_Q5 ? 48 : 16) + 16 * i, words);
                for (int side = 0; side < 2; ++side) {
                    Group group;
                    set_scales(i + side, group);
                    for (int j = 0; j < 8; ++j) {
                        group.u[j] = side ? high_nibbles(words[j]) : low_nibbles(words[j]);
                        if constexpr (IS_Q5) {
                            const Ints bit = shift_down(fifth[j], i + side) & every_byte(1);
                            group.u[j] = group.u[j] | shift_up(bit, 4);
                        }
                    }
                    sink(group);
                }
            }
        }
    }
};

// 256 elements: two times 64 bytes of low nibbles, then two times 32 of high bits, 16 scales by 16 elements, and d.
struct Q6KPanel {
    static constexpr int kBias = 32, kMost = 63;
    static constexpr bool kHasMins = false, kHasHalves = true;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t at = first / 8 * 210; at < (first + count) / 8 * 210; at += 210) {
            const Floats d = high_half(turn_word(rows, at + 206));
            Ints scales[4];
            turn_16(rows, at + 192, scales);
            for (int part = 0; part < 2; ++part) {
                Ints high[8], low[2][8];
                turn_32(rows, at + 128 + 32 * part, high);
                for (int side = 0; side < 2; ++side) turn_32(rows, at + 64 * part + 32 * side, low[side]);
#pragma GCC unroll 4
                for (int i = 0; i < 4; ++i) {
                    if (i % 2 == 0) rows.fetch<52>();
                    Group group;
                    for (int j = 0; j < 8; ++j) {
                        const Ints four = i < 2 ? low_nibbles(low[i][j]) : high_nibbles(low[i - 2][j]);
                        const Ints two = shift_down(high[j], 2 * i) & every_byte(3);
                        group.u[j] = four | shift_up(two, 4);
                    }
                    for (int half = 0; half < 2; ++half) {
                        const Ints last = shift_up(scales[2 * part + i / 2], 24 - 16 * (i % 2) - 8 * half);
                        group.scale[half] = d * to_floats(shift_down_signed(last, 24));
                    }
                    sink(group);
                }
            }
        }
    }
};

// int8 with flat groups of multiples of 32 in rows of multiples of 32: each group of 32 has one scale.
struct Int8Panel {
    static constexpr int kBias = kSignedBias, kMost = 255;
    static constexpr bool kHasMins = false, kHasHalves = false;
    template <class Sink>
    static void unpack(const Matrix& m, int64_t row, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        // Groups of 64 are usual, and a row's scales lie one after the other: four of them serve eight groups of ours.
        const bool is_usual = m.group == 64 && m.columns % 256 == 0;
        const PanelRows scale_rows(m.scales, m.columns / 16, row, m.rows);
        Ints four[4];
        for (int64_t g = first; g < first + count; ++g) {
            rows.fetch<32>();
            Group group;
            turn_32(rows, 32 * g, group.u);
            for (Ints& u : group.u) u = from_signed(u);
            if (is_usual) {
                if (g % 8 == 0) {
                    turn_16(scale_rows, 2 * g, four);
                    rows.fetch_scales(4 * 4 * kLanes);
                }
                group.scale[0] = as_floats(four[g % 8 / 2]);
            } else {
                alignas(64) float scales[kLanes];
                for (int i = 0; i < kLanes; ++i)
                    scales[i] = m.scales[(std::min(row + i, m.rows - 1) * m.columns + 32 * g) / m.group];
                group.scale[0] = load(scales);
            }
            sink(group);
        }
    }
};

// int8 in other rows and groups, which 16 divides: each 16 elements have a scale, and a row may end with half a group.
struct OddInt8Panel {
    static constexpr int kBias = kSignedBias, kMost = 255;
    static constexpr bool kHasMins = false, kHasHalves = true;
    template <class Sink>
    static void unpack(const Matrix& m, int64_t row, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t g = first; g < first + count; ++g) {
            Group group;
            for (int half = 0; half < 2; ++half) {
                const int64_t at = 32 * g + 16 * half;
                const bool is_there = at < m.columns;
                Ints words[4];
                alignas(64) float scales[kLanes];
                turn_16(rows, is_there ? at : 0, words);
                for (int j = 0; j < 4; ++j) group.u[4 * half + j] = from_signed(words[j]);
                for (int i = 0; i < kLanes; ++i)
                    scales[i] = is_there ? m.scales[(std::min(row + i, m.rows - 1) * m.columns + at) / m.group] : 0;
                group.scale[half] = load(scales);
            }
            sink(group);
        }
    }
};

}  // namespace
