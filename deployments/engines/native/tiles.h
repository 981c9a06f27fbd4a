// Dot products of rows of x with rows of W that were unpacked into L1 or L2, as unsigned bytes u with
// w = scale * u - offset, where every 16 elements have their scale and offset. Then
// - bf16: w and x are rounded to bfloat16, products are added up in float32;
// - avx512 (VNNI), avx2: y = sum over blocks (scale * dx * dot(u, xq))  -  sum over 16s (offset * dx * sum(xq)).

#pragma once

#include <cstdlib>

#include "activations.h"

namespace {

// Unpacked rows: `u` has `stride` bytes each, `scale` and `offset` have stride / 16 floats each.
struct Unpacked {
    uint8_t* u;
    float* scale;
    float* offset;
#if defined(__AVX512BF16__)
    uint16_t* bits;  // the same as bfloat16
#endif
    int64_t stride;
};

#if defined(__AVX512BF16__)

constexpr size_t kTileBytes = 2;

// Row `row` of `w` from bytes and scales to bfloat16.
void finish_row(const Unpacked& w, int64_t row) {
    const uint8_t* u = w.u + row * w.stride;
    const float* scale = w.scale + row * w.stride / 16;
    const float* offset = w.offset + row * w.stride / 16;
    uint16_t* out = w.bits + row * w.stride;
    const auto expand = [&](int64_t i) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(u + 16 * i)));
        return _mm512_fmsub_ps(_mm512_set1_ps(scale[i]), _mm512_cvtepi32_ps(wide), _mm512_set1_ps(offset[i]));
    };
    for (int64_t i = 0; i < w.stride / 16; i += 2)
        _mm512_store_si512(out + 16 * i, (__m512i)_mm512_cvtne2ps_pbh(expand(i + 1), expand(i)));
}

// R rows of W times C rows of x. Each result has lanes of its own, so R and C do not change it.
template <int R, int C>
void dot_tile(const Unpacked& w, int64_t row, const Activations& x, int64_t column, float (&out)[R][C]) {
    const int64_t stride = w.stride;
    const uint16_t* ws = w.bits + row * stride;
    const uint16_t* xs = x.bits + column * stride;
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < stride; i += 32) {
        __m512bh rows[R];
        for (int r = 0; r < R; ++r) rows[r] = (__m512bh)_mm512_load_si512(ws + r * stride + i);
        for (int c = 0; c < C; ++c) {
            const __m512bh values = (__m512bh)_mm512_loadu_si512(xs + c * stride + i);
            for (int r = 0; r < R; ++r) acc[r][c] = _mm512_dpbf16_ps(acc[r][c], rows[r], values);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) out[r][c] = _mm512_reduce_add_ps(acc[r][c]);
}
constexpr int kRows = 4, kColumns = 6;
#else

constexpr size_t kTileBytes = 0;

void finish_row(const Unpacked&, int64_t) {}

// Where the operands of a tile begin.
struct TileOperands {
    const uint8_t* u;
    const float *scale, *offset;
    const int8_t* q;
    const float *dx, *sum;
    TileOperands(const Unpacked& w, int64_t row, const Activations& x, int64_t column)
        : u(w.u + row * w.stride),
          scale(w.scale + row * w.stride / 16),
          offset(w.offset + row * w.stride / 16),
          q(x.q + column * w.stride),
          dx(x.scale + column * w.stride / 32),
          sum(x.sum + column * w.stride / 16) {}
};

#if defined(__AVX512VNNI__)

template <int R, int C>
void dot_tile(const Unpacked& w, int64_t row, const Activations& x, int64_t column, float (&out)[R][C]) {
    const __m512i by_16 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i by_32 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const int64_t stride = w.stride;
    const auto [u, scale, offset, q, dx, sum] = TileOperands(w, row, x, column);
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
    for (int64_t i = 0; i < stride; i += kStep) {
        __m512i xs[C];
        __m512 dxs[C];
        for (int c = 0; c < C; ++c) {
            xs[c] = _mm512_loadu_si512(q + c * stride + i);
            const __m128 pair = _mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(dx + c * stride / 32 + i / 32)));
            dxs[c] = _mm512_permutexvar_ps(by_32, _mm512_castps128_ps512(pair));
        }
        for (int r = 0; r < R; ++r) {
            const __m512i us = _mm512_loadu_si512(u + r * stride + i);
            const __m128 four = _mm_loadu_ps(scale + r * stride / 16 + i / 16);
            const __m512 scales = _mm512_permutexvar_ps(by_16, _mm512_castps128_ps512(four));
            for (int c = 0; c < C; ++c) {
                const __m512i dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), us, xs[c]);
                acc[r][c] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(scales, dxs[c]), acc[r][c]);
            }
        }
    }
    const int64_t count = stride / 16;
    for (int64_t i = 0; i < count; i += 16) {
        const __mmask16 mask = count - i >= 16 ? 0xffff : (1u << (count - i)) - 1;
        for (int c = 0; c < C; ++c) {
            const __m512 sums = _mm512_maskz_loadu_ps(mask, sum + c * count + i);
            for (int r = 0; r < R; ++r)
                acc[r][c] = _mm512_fnmadd_ps(_mm512_maskz_loadu_ps(mask, offset + r * count + i), sums, acc[r][c]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) out[r][c] = _mm512_reduce_add_ps(acc[r][c]);
}
constexpr int kRows = 4, kColumns = 4;

#else

// AVX2 has no exact product of unsigned and signed bytes: both become 16 bits wide.
template <int R, int C>
void dot_tile(const Unpacked& w, int64_t row, const Activations& x, int64_t column, float (&out)[R][C]) {
    const int64_t stride = w.stride;
    const auto [u, scale, offset, q, dx, sum] = TileOperands(w, row, x, column);
    __m256 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm256_setzero_ps();
    for (int64_t i = 0; i < stride; i += 16) {
        __m256i xs[C];
        for (int c = 0; c < C; ++c)
            xs[c] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q + c * stride + i)));
        for (int r = 0; r < R; ++r) {
            const __m256i us = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(u + r * stride + i)));
            for (int c = 0; c < C; ++c) {
                const float both = scale[r * stride / 16 + i / 16] * dx[c * stride / 32 + i / 32];
                const __m256 dot = _mm256_cvtepi32_ps(_mm256_madd_epi16(us, xs[c]));
                acc[r][c] = _mm256_fmadd_ps(dot, _mm256_set1_ps(both), acc[r][c]);
            }
        }
    }
    const int64_t count = stride / 16;  // a multiple of 4
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            __m128 corrections = _mm_setzero_ps();
            for (int64_t i = 0; i < count; i += 4)
                corrections = _mm_fmadd_ps(_mm_loadu_ps(offset + r * count + i), _mm_loadu_ps(sum + c * count + i), corrections);
            __m128 total = _mm_add_ps(_mm256_castps256_ps128(acc[r][c]), _mm256_extractf128_ps(acc[r][c], 1));
            total = _mm_sub_ps(total, corrections);
            total = _mm_add_ps(total, _mm_movehl_ps(total, total));
            out[r][c] = _mm_cvtss_f32(_mm_add_ss(total, _mm_movehdup_ps(total)));
        }
}
constexpr int kRows = 2, kColumns = 4;

#endif
#endif

template <int R>
void dot_rows(const Unpacked& w, int64_t row, int64_t w_row, const Activations& x, int64_t m, int64_t n, void* y, int element) {
    int64_t column = 0;
    for (; column + kColumns <= m; column += kColumns) {
        float out[R][kColumns];
        dot_tile<R, kColumns>(w, row, x, column, out);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kColumns; ++c) store_element(y, element, (column + c) * n + w_row + r, out[r][c]);
    }
    for (; column < m; ++column) {
        float out[R][1];
        dot_tile<R, 1>(w, row, x, column, out);
        for (int r = 0; r < R; ++r) store_element(y, element, column * n + w_row + r, out[r][0]);
    }
}
Unpacked unpacked_in(char* memory, int64_t rows, int64_t stride) {
    Unpacked to;
    to.u = reinterpret_cast<uint8_t*>(memory);
    to.scale = reinterpret_cast<float*>(memory + rows * stride);
    to.offset = to.scale + rows * stride / 16;
#if defined(__AVX512BF16__)
    to.bits = reinterpret_cast<uint16_t*>(to.offset + rows * stride / 16);
#endif
    to.stride = stride;
    return to;
}

void clear_padding(const Unpacked& to, int64_t row, int64_t columns) {
    std::memset(to.u + row * to.stride + columns, 0, to.stride - columns);
    fill(to.scale + row * to.stride / 16 + columns / 16, (to.stride - columns) / 16, 0);
    fill(to.offset + row * to.stride / 16 + columns / 16, (to.stride - columns) / 16, 0);
}

}  // namespace
