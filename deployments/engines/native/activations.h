// Rows of x as the kernels take them: bfloat16 (AVX512_BF16), else int8 by 32 elements (absmax / 127, as llama.cpp does).

#pragma once

#include <algorithm>
#include <cmath>

#include "blocks.h"

namespace {

constexpr int64_t kStep = 64;  // elements of one round of the inner loop; scratch rows are padded to it with zeros

enum Element { FLOAT32 = 0, BFLOAT16 = 1 };

// Rows of x as the kernel takes them, padded with zeros to `stride` elements.
struct Activations {
#if defined(__AVX512BF16__)
    const uint16_t* bits;
#else
    int8_t* q;
    float* scale;  // by 32 elements
    float* sum;    // by 16 elements: dx * sum(q)
    int32_t* lanes;  // by 4 elements: -sum(q); for VNNI alone
#endif
    int64_t stride;
};

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

#if defined(__AVX512BF16__)

constexpr size_t kActivationBytes = 2;  // per element

bool use_in_place(const void* x, int element, int64_t k, int64_t stride, Activations& to) {
    if (element != BFLOAT16 || k != stride) return false;
    to.bits = static_cast<const uint16_t*>(x);
    return true;
}

void place_activations(char* memory, int64_t, Activations& to) { to.bits = reinterpret_cast<uint16_t*>(memory); }

void prepare_row(const void* x, int element, int64_t row, int64_t k, const Activations& to) {
    uint16_t* out = const_cast<uint16_t*>(to.bits) + row * to.stride;
    for (int64_t i = 0; i < k; ++i) out[i] = to_bfloat16(load_element(x, element, row * k + i));
    std::memset(out + k, 0, 2 * (to.stride - k));
}
#else

constexpr size_t kActivationBytes = 3;  // a byte, 3 floats by 32 elements and an integer by 4, rounded up

bool use_in_place(const void*, int, int64_t, int64_t, Activations&) { return false; }

void place_activations(char* memory, int64_t m, Activations& to) {
    to.q = reinterpret_cast<int8_t*>(memory);
    to.scale = reinterpret_cast<float*>(memory + m * to.stride);
    to.sum = to.scale + m * to.stride / 32;
    to.lanes = reinterpret_cast<int32_t*>(to.sum + m * to.stride / 16);
}
void prepare_row(const void* x, int element, int64_t row, int64_t k, const Activations& to) {
    int8_t* q = to.q + row * to.stride;
    float* scale = to.scale + row * to.stride / 32;
    float* sum = to.sum + row * to.stride / 16;
    for (int64_t begin = 0; begin < to.stride; begin += 32) {
        float values[32];
        const int64_t count = std::clamp<int64_t>(k - begin, 0, 32);
        for (int64_t j = 0; j < count; ++j) values[j] = load_element(x, element, row * k + begin + j);
        for (int64_t j = count; j < 32; ++j) values[j] = 0;
#if defined(__AVX512VNNI__)
        const __m512 low = _mm512_loadu_ps(values), high = _mm512_loadu_ps(values + 16), zero = _mm512_setzero_ps();
        const float most = _mm512_reduce_max_ps(_mm512_max_ps(_mm512_abs_ps(low), _mm512_abs_ps(high)));
        const float poison = _mm512_reduce_add_ps(_mm512_fmadd_ps(low, zero, _mm512_mul_ps(high, zero)));
        const float d = most / 127 + poison;
        const __m512 inverse = _mm512_set1_ps(most > 0 ? 127 / most : 0);
        const auto bytes = [&](__m512 part) {
            return _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(part, inverse)));
        };
        __m256i all = poison == 0 ? _mm256_set_m128i(bytes(high), bytes(low)) : _mm256_setzero_si256();
        store_32(reinterpret_cast<uint8_t*>(q + begin), all);
        int32_t fours[8];
        all = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), all);
        store_32(reinterpret_cast<uint8_t*>(fours), all);
        const __m256i negative = _mm256_sub_epi32(_mm256_setzero_si256(), all);
        store_32(reinterpret_cast<uint8_t*>(to.lanes + (row * to.stride + begin) / 4), negative);
        const int sums[2] = {fours[0] + fours[1] + fours[2] + fours[3], fours[4] + fours[5] + fours[6] + fours[7]};
#else
        float most = 0, poison = 0;
        for (int j = 0; j < 32; ++j) {
            const float size = std::fabs(values[j]);
            most = size > most ? size : most;
            poison += values[j] * 0;  // infinities and NaNs stay visible: the scale becomes NaN
        }
        const float d = most / 127 + poison, inverse = most > 0 ? 127 / most : 0;
        int sums[2] = {0, 0};
        for (int j = 0; j < 32; ++j) {
            const int value = poison == 0 ? static_cast<int>(std::nearbyint(values[j] * inverse)) : 0;
            q[begin + j] = static_cast<int8_t>(std::clamp(value, -127, 127));
        }
        for (int j = 0; j < 32; ++j) sums[j / 16] += q[begin + j];
#endif
        scale[begin / 32] = d;
        sum[begin / 16] = d * sums[0];
        sum[begin / 16 + 1] = d * sums[1];
    }
}
#endif

}  // namespace
