// The exponential function of decode steps and of the sampler.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace {

// e^x by 2^n p(r), to two units in the last place (0 below e^-87), in code that the compiler vectorizes.
inline float exponential(float x) {
    const bool is_zero = x < -87.0f;  // the rest is computed all the same: clamped here, vectors pay for it four times
    x = std::min(x, 88.0f);
    const float shifted = x * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits - 0x4b400000u + 127) << 23;
    float power;
    std::memcpy(&power, &bits, 4);
    return is_zero ? 0.0f : p * power;
}

// Sums of e^((x - best) factor) by blocks of `block` elements of one row, the last of which may be shorter.
inline void add_exponentials(const float* x, int64_t size, int64_t block, float best, float factor, double* sums) {
    for (int64_t begin = 0; begin < size; begin += block, ++sums) {
        const int64_t end = std::min(begin + block, size);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; ++i) sum += exponential((x[i] - best) * factor);
        *sums = sum;
    }
}

}  // namespace
