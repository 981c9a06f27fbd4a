// Matrices in the blocks of their file, and plain unpacking of one row.
//
// Block layouts: ggml-common.h (ggml-org/ggml). A Kuiper matrix is int8 [rows * columns] with one float scale for
// `group` consecutive elements, across row borders. The caller has checked every size.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

enum Type { F32 = 0, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30, GROUP_INT8 = 100 };

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
