// Products for AVX2: dot products of rows of x with rows of W that were unpacked into L1 or L2, as unsigned bytes u with
// w = scale * u - offset, where every 16 elements have their scale and offset. Then
// y = sum over blocks (scale * dx * dot(u, xq))  -  sum over 16s (offset * dx * sum(xq)).

#pragma once

#include "activations.h"

namespace {

#if !defined(__AVX512VNNI__)

// Unpacked rows: `u` has `stride` bytes each, `scale` and `offset` have stride / 16 floats each.
struct Unpacked {
    uint8_t* u;
    float* scale;
    float* offset;
    int64_t stride;
};

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

template <int R>
void dot_rows(const Unpacked& w, int64_t row, int64_t w_row, const Activations& x, int64_t m, const Output& y) {
    int64_t column = 0;
    for (; column + kColumns <= m; column += kColumns) {
        float out[R][kColumns];
        dot_tile<R, kColumns>(w, row, x, column, out);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < kColumns; ++c) store_element(y.at, y.element, y.index(column + c, w_row + r), out[r][c]);
    }
    for (; column < m; ++column) {
        float out[R][1];
        dot_tile<R, 1>(w, row, x, column, out);
        for (int r = 0; r < R; ++r) store_element(y.at, y.element, y.index(column, w_row + r), out[r][0]);
    }
}
Unpacked unpacked_in(char* memory, int64_t rows, int64_t stride) {
    Unpacked to;
    to.u = reinterpret_cast<uint8_t*>(memory);
    to.scale = reinterpret_cast<float*>(memory + rows * stride);
    to.offset = to.scale + rows * stride / 16;
    to.stride = stride;
    return to;
}

void clear_padding(const Unpacked& to, int64_t row, int64_t columns) {
    std::memset(to.u + row * to.stride + columns, 0, to.stride - columns);
    fill(to.scale + row * to.stride / 16 + columns / 16, (to.stride - columns) / 16, 0);
    fill(to.offset + row * to.stride / 16 + columns / 16, (to.stride - columns) / 16, 0);
}

// Few rows of x: W is read once from memory, through L1. Many: a tile in L2 serves them all.
int64_t tile_rows(int64_t m) { return m <= 16 ? 4 : 32; }

size_t product_scratch_bytes(const Matrix& matrix, int64_t m) {
    const int64_t stride = padded(matrix.columns);
    return tile_rows(m) * (stride + stride / 16 * 8);
}

// y [m, rows of W] in its columns `first` to `last`, from m rows of x; some rows of W are unpacked at a time.
void multiply_rows(const Matrix& matrix, int64_t first, int64_t last, const Activations& x, int64_t m,
                   const Output& y, char* scratch, const uint8_t*) {
    const int64_t tile = tile_rows(m);
    const Unpacked w = unpacked_in(scratch, tile, x.stride);
    for (; first < last; first += tile) {
        const int64_t count = std::min(tile, last - first);
        for (int64_t row = 0; row < count; ++row) {
            const int64_t at = row * w.stride;
            unpack_row(matrix, first + row, w.u + at, w.scale + at / 16, w.offset + at / 16);
            clear_padding(w, row, matrix.columns);
        }
        int64_t row = 0;
        for (; row + kRows <= count; row += kRows)
            dot_rows<kRows>(w, row, first + row, x, m, y);
        for (; row < count; ++row) dot_rows<1>(w, row, first + row, x, m, y);
    }
}

#endif

}  // namespace
