// Gated features in bfloat16, rounded once: of a row [2 n] its first half, each element by the GELU of the second half's.

#pragma once

#include "full_attention.h"

#if defined(__AVX512VNNI__)

namespace {

// The GELU by the normal distribution, to a millionth. The tail of the distribution is Abramowitz and Stegun's 7.1.26.
inline __attribute__((target("avx512bf16"), always_inline)) Floats gelu(Floats x) {
    const Floats size = _mm512_min_ps(every_float(14), _mm512_abs_ps(x) * every_float(0.70710678f));
    const Floats below = add_product(size, every_float(0.3275911f), every_float(1)), near = _mm512_rcp14_ps(below);
    const Floats t = near * subtract_product(below, near, every_float(2));
    Floats tail = every_float(0.5307027145f);  // half of the coefficients
    tail = add_product(tail, t, every_float(-0.7265760135f));
    tail = add_product(tail, t, every_float(0.7107068705f));
    tail = add_product(tail, t, every_float(-0.142248368f));
    tail = add_product(tail, t, every_float(0.127414796f));
    tail = tail * t * power_of_two(size * size * every_float(-1.44269504f));
    const __mmask16 is_positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return x * _mm512_mask_sub_ps(tail, is_positive, every_float(1), tail);
}

__attribute__((target("avx512bf16"))) inline void gate_row(const uint16_t* x, int64_t n, uint16_t* y) {
    for (int64_t i = 0; i < n; i += 16) {
        const auto mask = static_cast<__mmask16>(lanes_from_to(0, n - i));
        const auto widened = [&](const uint16_t* at) {
            return as_floats(shift_up(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, at + i)), 16));
        };
        _mm256_mask_storeu_epi16(y + i, mask, (__m256i)_mm512_cvtneps_pbh(widened(x) * gelu(widened(x + n))));
    }
}

}  // namespace

#endif
