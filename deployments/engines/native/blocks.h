// Matrices in the blocks of their file, and plain unpacking of one row.
//
// Block layouts: ggml-common.h (ggml-org/ggml). A Kuiper matrix is int8 [rows * columns] with one float scale for
// `group` consecutive elements, across row borders. The caller has checked every size.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

enum Type {
    F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, BF16 = 30, MXFP4 = 39, GROUP_INT8 = 100
};

// What the sixteen nibbles of a format stand for: kvalues_iq4nl, and twice the numbers of E2M1.
alignas(16) constexpr int8_t kIq4Values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
alignas(16) constexpr int8_t kFp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Matrix {
    int type;
    const uint8_t* data;
    const float* scales;  // of GROUP_INT8
    int64_t group, rows, columns, row_bytes;
};
inline float half(const uint8_t* at) {
    uint16_t bits;
    std::memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
}

inline uint32_t word(const uint8_t* at) {
    uint32_t bits;
    std::memcpy(&bits, at, 4);
    return bits;
}

inline void fill(float* at, int count, float value) {
    for (int i = 0; i < count; ++i) at[i] = value;
}

// 16 bytes as 32 nibbles: the low ones of all bytes first.
inline __m256i nibbles(const uint8_t* q) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
    return _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes), _mm256_set1_epi8(15));
}

// 32 bits as 32 bytes, 16 where the bit is set.
inline __m256i fifth_bits(uint32_t bits) {
    const __m256i order = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i spread = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(bits)), order);
    const __m256i chosen = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201ull));
    const __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, chosen), chosen);
    return _mm256_and_si256(is_set, _mm256_set1_epi8(16));
}

// Half of the power of two that a byte of E8M0 says; below the smallest normal float, 0.
inline float half_power(uint8_t exponent) {
    const uint32_t bits = exponent > 1 ? static_cast<uint32_t>(exponent - 1) << 23 : 0;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// 16 bytes as the values of 32 nibbles and 128 more, the low ones of all bytes first.
inline void look_up_32(uint8_t* u, const uint8_t* q, const int8_t (&values)[16]) {
    for (int j = 0; j < 16; ++j) {
        u[j] = static_cast<uint8_t>(values[q[j] & 15] + 128);
        u[16 + j] = static_cast<uint8_t>(values[q[j] >> 4] + 128);
    }
}

// The 6-bit scale number `i` of the 16 in the 12 bytes of a Q3_K block, which are 32 more.
inline int q3_scale(const uint8_t* packed, int i) {
    const int low = i < 8 ? packed[i] & 15 : packed[i - 8] >> 4;
    return (low | (packed[8 + i % 4] >> 2 * (i / 4) & 3) << 4) - 32;
}

inline void store_32(uint8_t* u, __m256i bytes) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(u), bytes); }

// Scale and minimum number `i` of the eight 6-bit pairs of a Q4_K or Q5_K block.
inline void scale_and_min(const uint8_t* packed, int i, uint8_t& scale, uint8_t& min) {
    if (i < 4) {
        scale = packed[i] & 63;
        min = packed[i + 4] & 63;
    } else {
        scale = (packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4);
        min = (packed[i + 4] >> 4) | (packed[i] >> 6 << 4);
    }
}

void unpack_row(const Matrix& m, int64_t row, uint8_t* __restrict u, float* __restrict scale, float* __restrict offset) {
    const uint8_t* __restrict at = m.data + row * m.row_bytes;
    const int64_t k = m.columns;
    switch (m.type) {
        case Q8_0:
            for (int64_t b = 0; b < k / 32; ++b, at += 34, u += 32) {
                const float d = half(at);
                for (int j = 0; j < 32; ++j) u[j] = at[2 + j] ^ 0x80;
                fill(scale + 2 * b, 2, d);
                fill(offset + 2 * b, 2, 128 * d);
            }
            break;
        case Q4_0:
        case Q4_1: {
            const bool has_min = m.type == Q4_1;
            for (int64_t b = 0; b < k / 32; ++b, at += has_min ? 20 : 18, u += 32) {
                const float d = half(at);
                store_32(u, nibbles(at + (has_min ? 4 : 2)));
                fill(scale + 2 * b, 2, d);
                fill(offset + 2 * b, 2, has_min ? -half(at + 2) : 8 * d);
            }
            break;
        }
        case Q5_0:
        case Q5_1: {
            const bool has_min = m.type == Q5_1;
            for (int64_t b = 0; b < k / 32; ++b, at += has_min ? 24 : 22, u += 32) {
                const float d = half(at);
                const __m256i high = fifth_bits(word(at + (has_min ? 4 : 2)));
                store_32(u, _mm256_or_si256(nibbles(at + (has_min ? 8 : 6)), high));
                fill(scale + 2 * b, 2, d);
                fill(offset + 2 * b, 2, has_min ? -half(at + 2) : 16 * d);
            }
            break;
        }
        case Q2_K:
        case Q3_K: {
            const bool is_q3 = m.type == Q3_K;
            for (int64_t b = 0; b < k / 256; ++b, at += is_q3 ? 110 : 84, u += 256) {
                const float d = half(at + (is_q3 ? 108 : 80));
                for (int j = 0; j < 256; ++j) {
                    u[j] = at[(is_q3 ? 32 : 16) + j / 128 * 32 + j % 32] >> 2 * (j / 32 % 4) & 3;
                    if (is_q3) u[j] |= (at[j % 32] >> j / 32 & 1) << 2;
                }
                for (int i = 0; i < 16; ++i) {
                    scale[b * 16 + i] = d * (is_q3 ? q3_scale(at + 96, i) : at[i] & 15);
                    offset[b * 16 + i] = is_q3 ? 4 * scale[b * 16 + i] : half(at + 82) * (at[i] >> 4);
                }
            }
            break;
        }
        case IQ4_NL:
        case MXFP4: {
            const bool is_fp4 = m.type == MXFP4;
            for (int64_t b = 0; b < k / 32; ++b, at += is_fp4 ? 17 : 18, u += 32) {
                const float d = is_fp4 ? half_power(at[0]) : half(at);
                look_up_32(u, at + (is_fp4 ? 1 : 2), is_fp4 ? kFp4Values : kIq4Values);
                fill(scale + 2 * b, 2, d);
                fill(offset + 2 * b, 2, 128 * d);
            }
            break;
        }
        case IQ4_XS:
            for (int64_t b = 0; b < k / 256; ++b, at += 136)
                for (int i = 0; i < 8; ++i, u += 32) {
                    const int high = (word(at) >> (16 + 2 * i) & 3) << 4, low = at[4 + i / 2] >> 4 * (i % 2) & 15;
                    const float d = half(at) * static_cast<float>((high | low) - 32);
                    look_up_32(u, at + 8 + 16 * i, kIq4Values);
                    fill(scale + 16 * b + 2 * i, 2, d);
                    fill(offset + 16 * b + 2 * i, 2, 128 * d);
                }
            break;
        case Q4_K:
        case Q5_K: {
            const bool is_q5 = m.type == Q5_K;
            for (int64_t b = 0; b < k / 256; ++b, at += is_q5 ? 176 : 144) {
                const float d = half(at), dmin = half(at + 2);
                const uint8_t* high = at + 16;
                const uint8_t* q = at + (is_q5 ? 48 : 16);
                for (int i = 0; i < 8; ++i, u += 32) {
                    const uint8_t* nibbles = q + i / 2 * 32;
                    if (i % 2 == 0)
                        for (int j = 0; j < 32; ++j) u[j] = nibbles[j] & 15;
                    else
                        for (int j = 0; j < 32; ++j) u[j] = nibbles[j] >> 4;
                    if (is_q5)
                        for (int j = 0; j < 32; ++j) u[j] |= (high[j] >> i & 1) << 4;
                    uint8_t s, min;
                    scale_and_min(at + 4, i, s, min);
                    fill(scale + b * 16 + 2 * i, 2, d * s);
                    fill(offset + b * 16 + 2 * i, 2, dmin * min);
                }
            }
            break;
        }
        case Q6_K:
            for (int64_t b = 0; b < k / 256; ++b, at += 210) {
                const float d = half(at + 208);
                const int8_t* s = reinterpret_cast<const int8_t*>(at + 192);
                for (int part = 0; part < 2; ++part, u += 128) {
                    const uint8_t* low = at + 64 * part;
                    const uint8_t* high = at + 128 + 32 * part;
                    for (int j = 0; j < 32; ++j) u[j] = (low[j] & 15) | ((high[j] & 3) << 4);
                    for (int j = 0; j < 32; ++j) u[32 + j] = (low[32 + j] & 15) | ((high[j] >> 2 & 3) << 4);
                    for (int j = 0; j < 32; ++j) u[64 + j] = (low[j] >> 4) | ((high[j] >> 4 & 3) << 4);
                    for (int j = 0; j < 32; ++j) u[96 + j] = (low[32 + j] >> 4) | ((high[j] >> 6) << 4);
                }
                for (int i = 0; i < 16; ++i) {
                    scale[b * 16 + i] = d * s[i];
                    offset[b * 16 + i] = 32 * (d * s[i]);
                }
            }
            break;
        case GROUP_INT8:
            for (int64_t j = 0; j < k; ++j) u[j] = at[j] ^ 0x80;
            for (int64_t i = 0; i < k / 16; ++i) {
                const float d = m.scales[(row * k + 16 * i) / m.group];
                scale[i] = d;
                offset[i] = 128 * d;
            }
            break;
    }
}

}  // namespace
