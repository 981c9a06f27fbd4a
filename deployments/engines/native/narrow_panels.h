// Panels (panels.h) of the types whose elements are two or three bits, or places in a table of values.

#pragma once

#include "panels.h"

namespace {

// IQ4_NL, MXFP4: 32 elements in 16 bytes of nibbles, the low ones first, each a value of a table, behind the scale.
template <bool IS_FP4>
struct TablePanel {
    static constexpr int kBias = kSignedBias, kMost = 255, kBytes = IS_FP4 ? 17 : 18;
    static constexpr bool kHasMins = false, kHasHalves = false;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t g = first; g < first + count; ++g) {
            rows.fetch<kBytes>();
            Group group;
            look_up_group<IS_FP4>(rows, kBytes * (g + 1) - 16, group);
            if constexpr (IS_FP4) {  // the byte is the exponent of twice the scale
                const Ints exponents = greater(turn_word(rows, kBytes * g) & every_int(255), every_int(1));
                group.scale[0] = as_floats(shift_up(sum(exponents, every_int(-1)), 23));
            } else {
                group.scale[0] = turn_half(rows, kBytes * g);
            }
            sink(group);
        }
    }
    template <bool IS_E2M1>
    static void look_up_group(const PanelRows& rows, int64_t at, Group& group) {
        Ints words[4];
        turn_16(rows, at, words);
        const int8_t(&values)[16] = IS_E2M1 ? kFp4Values : kIq4Values;
        for (int j = 0; j < 4; ++j) {
            group.u[j] = from_signed(look_up(values, low_nibbles(words[j])));
            group.u[4 + j] = from_signed(look_up(values, high_nibbles(words[j])));
        }
    }
};

// IQ4_XS: 256 elements; d, the upper two bits of eight scales, their lower four, nibbles as IQ4_NL has them.
struct Iq4XsPanel {
    static constexpr int kBias = kSignedBias, kMost = 255, kBytes = 136;
    static constexpr bool kHasMins = false, kHasHalves = false;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t at = first / 8 * kBytes; at < (first + count) / 8 * kBytes; at += kBytes) {
            const Ints head = turn_word(rows, at), lows = turn_word(rows, at + 4);
            const Floats d = low_half(head);
            for (int i = 0; i < 8; ++i) {
                rows.fetch<kBytes / 8>();
                Group group;
                TablePanel<false>::look_up_group<false>(rows, at + 8 + 16 * i, group);
                const Ints high = shift_up(shift_down(head, 16 + 2 * i) & every_int(3), 4);
                const Ints scale = (shift_down(lows, 4 * i) & every_int(15)) | high;
                group.scale[0] = d * to_floats(sum(scale, every_int(-32)));
                sink(group);
            }
        }
    }
};

// Q2_K, Q3_K: 256 elements of two bits, those of four groups in 32 bytes; of Q3_K, third bits before them. Scales by 16
// elements: nibbles beside those of minima before all, or 6 bits behind.
template <bool IS_Q3>
struct Q23KPanel {
    static constexpr int kBias = IS_Q3 ? 4 : 0, kMost = IS_Q3 ? 7 : 3, kBytes = IS_Q3 ? 110 : 84;
    static constexpr bool kHasMins = !IS_Q3, kHasHalves = true;
    template <class Sink>
    static void unpack(const Matrix&, int64_t, PanelRows& rows, int64_t first, int64_t count, Sink& sink) {
        for (int64_t at = first / 8 * kBytes; at < (first + count) / 8 * kBytes; at += kBytes) {
            Ints scales[4], third[8];  // four numbers in a lane
            Floats d, dmin;
            if constexpr (IS_Q3) {
                Ints tail[4];  // the last two bytes of elements, 12 of scales, d
                turn_16(rows, at + 94, tail);
                d = high_half(tail[3]);
                Ints packed[3];
                for (int i = 0; i < 3; ++i) packed[i] = shift_down(tail[i], 16) | shift_up(tail[i + 1], 16);
                for (int i = 0; i < 4; ++i) {
                    const Ints low = i < 2 ? low_nibbles(packed[i]) : high_nibbles(packed[i - 2]);
                    scales[i] = low | shift_up(shift_down(packed[2], 2 * i) & every_byte(3), 4);
                }
                turn_32(rows, at, third);
            } else {
                const Ints last = turn_word(rows, at + 80);
                d = low_half(last);
                dmin = high_half(last);
                turn_16(rows, at, scales);
            }
            for (int part = 0; part < 2; ++part) {
                rows.fetch<kBytes / 2>();
                Ints words[8];
                turn_32(rows, at + (IS_Q3 ? 32 : 16) + 32 * part, words);
                for (int i = 4 * part; i < 4 * part + 4; ++i) {
                    Group group;
                    for (int j = 0; j < 8; ++j) {
                        group.u[j] = shift_down(words[j], 2 * (i % 4)) & every_byte(3);
                        if constexpr (IS_Q3)
                            group.u[j] = group.u[j] | shift_up(shift_down(third[j], i) & every_byte(1), 2);
                    }
                    for (int half = 0; half < 2; ++half) {
                        const Ints byte = shift_down(scales[i / 2], 16 * (i % 2) + 8 * half);
                        if constexpr (IS_Q3) {
                            group.scale[half] = d * to_floats(sum(byte & every_int(63), every_int(-32)));
                        } else {
                            group.scale[half] = d * to_floats(byte & every_int(15));
                            group.min[half] = dmin * to_floats(shift_down(byte, 4) & every_int(15));
                        }
                    }
                    sink(group);
                }
            }
        }
    }
};

}  // namespace
