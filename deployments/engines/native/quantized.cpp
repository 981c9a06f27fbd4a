// Products with weights that stay in their file's blocks, y = x W^T, and plain unpacking.
//
// Compiled once per instruction set (building.py sets ISA); library.py chooses by the processor. W is unpacked, by a few
// rows at a time into L1 or L2, as unsigned bytes u with w = scale * u - offset, where every 16 elements have their scale
// and offset. Then
// - bf16 (AVX512_BF16): w and x are rounded to bfloat16, products are added up in float32;
// - avx512 (VNNI; most formats without the unpacking, fused_rows.h), avx2: x is quantized by 32 elements (absmax / 127, as llama.cpp does), and
//   y = sum over blocks (scale * dx * dot(u, xq))  -  sum over 16s (offset * dx * sum(xq)).
// Each has one arithmetic for every number of rows of x: a row's result never depends on its neighbours, bit for bit.
//
// Block layouts: ggml-common.h (ggml-org/ggml). A Kuiper matrix is int8 [rows * columns] with one float scale for
// `group` consecutive elements, across row borders. The caller has checked every size.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int64_t kStep = 64;  // elements of one round of the inner loop; scratch rows are padded to it with zeros

enum Type { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, GROUP_INT8 = 100 };
enum Element { FLOAT32 = 0, BFLOAT16 = 1 };

struct Matrix {
    int type;
    const uint8_t* data;
    const float* scales;  // of GROUP_INT8
    int64_t group, rows, columns, row_bytes;
};

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
constexpr size_t kTileBytes = 2;

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

constexpr size_t kActivationBytes = 3;  // a byte, 3 floats by 32 elements and an integer by 4, rounded up
constexpr size_t kTileBytes = 0;

bool use_in_place(const void*, int, int64_t, int64_t, Activations&) { return false; }

void place_activations(char* memory, int64_t m, Activations& to) {
    to.q = reinterpret_cast<int8_t*>(memory);
    to.scale = reinterpret_cast<float*>(memory + m * to.stride);
    to.sum = to.scale + m * to.stride / 32;
    to.lanes = reinterpret_cast<int32_t*>(to.sum + m * to.stride / 16);
}

void finish_row(const Unpacked&, int64_t) {}

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

#if defined(__AVX512VNNI__)

template <int R, int C>
void dot_tile(const Unpacked& w, int64_t row, const Activations& x, int64_t column, float (&out)[R][C]) {
    const __m512i by_16 = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i by_32 = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const int64_t stride = w.stride;
    const uint8_t* u = w.u + row * stride;
    const float* scale = w.scale + row * stride / 16;
    const float* offset = w.offset + row * stride / 16;
    const int8_t* q = x.q + column * stride;
    const float* dx = x.scale + column * stride / 32;
    const float* sum = x.sum + column * stride / 16;
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
    const uint8_t* u = w.u + row * stride;
    const float* scale = w.scale + row * stride / 16;
    const float* offset = w.offset + row * stride / 16;
    const int8_t* q = x.q + column * stride;
    const float* dx = x.scale + column * stride / 32;
    const float* sum = x.sum + column * stride / 16;
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

// Memory that a thread keeps between calls: allocating megabytes per product costs page faults.
struct Scratch {
    char* memory = nullptr;
    size_t nbytes = 0;
    ~Scratch() { std::free(memory); }
    char* reserve(size_t wanted) {
        if (wanted > nbytes) {
            std::free(memory);
            nbytes = (wanted + 4095) / 4096 * 4096;
            memory = static_cast<char*>(std::aligned_alloc(64, nbytes));
            if (!memory) nbytes = 0;
        }
        return memory;
    }
};
thread_local Scratch tile_scratch, activation_scratch;

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

#include "fused_rows.h"

#define JOINED_(a, b) a##_##b
#define JOINED(a, b) JOINED_(a, b)

// y [m, n] = x [m, k] W^T. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_matmul, ISA)(int type, const uint8_t* data, const float* scales, int64_t group, int64_t n,
                                           int64_t k, int64_t row_bytes, const void* x, int x_element, int64_t m, void* y,
                                           int y_element, int threads) {
    const Matrix matrix{type, data, scales, group, n, k, row_bytes};
    const int64_t stride = (k + kStep - 1) / kStep * kStep;
    Activations rows;
    rows.stride = stride;
    const bool is_ready = use_in_place(x, x_element, k, stride, rows);
    if (!is_ready) {
        char* memory = activation_scratch.reserve(m * stride * kActivationBytes);
        if (!memory) return 1;
        place_activations(memory, m, rows);
    }
#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__)
    if (has_cursor(matrix)) {
#pragma omp parallel num_threads(threads)
        {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < m; ++row) prepare_row(x, x_element, row, k, rows);
#pragma omp for schedule(dynamic, 1)
            for (int64_t first = 0; first < n; first += 32)
                multiply_packed(matrix, first, std::min(n, first + 32), rows, m, y, y_element);
        }
        return 0;
    }
#endif
    // Few rows of x: W is read once from memory, through L1. Many: a tile in L2 serves them all.
    const int64_t tile = m <= 16 ? 4 : 32;
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < (is_ready ? 0 : m); ++row) prepare_row(x, x_element, row, k, rows);
        char* own = tile_scratch.reserve(tile * stride * (1 + kTileBytes) + tile * stride / 16 * 8);
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 8)
        for (int64_t first = 0; first < n; first += tile) {
            if (!own) continue;
            const Unpacked w = unpacked_in(own, tile, stride);
            const int64_t count = std::min(tile, n - first);
            for (int64_t row = 0; row < count; ++row) {
                float* scale = w.scale + row * stride / 16;
                float* offset = w.offset + row * stride / 16;
                unpack_row(matrix, first + row, w.u + row * stride, scale, offset);
                clear_padding(w, row, k);
                finish_row(w, row);
            }
            int64_t row = 0;
            for (; row + kRows <= count; row += kRows) dot_rows<kRows>(w, row, first + row, rows, m, n, y, y_element);
            for (; row < count; ++row) dot_rows<1>(w, row, first + row, rows, m, n, y, y_element);
        }
    }
    return failed;
}

// Rows first to first + count of W as float32 [count, k]: exactly what gguf-py's dequantize gives, up to one rounding.
extern "C" int JOINED(atelier_unpack, ISA)(int type, const uint8_t* data, const float* scales, int64_t group, int64_t n,
                                           int64_t k, int64_t row_bytes, int64_t first, int64_t count, float* out,
                                           int threads) {
    const Matrix matrix{type, data, scales, group, n, k, row_bytes};
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        char* own = tile_scratch.reserve(k + k / 16 * 8);
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(static)
        for (int64_t row = 0; row < count; ++row) {
            if (!own) continue;
            const Unpacked w = unpacked_in(own, 1, k);
            unpack_row(matrix, first + row, w.u, w.scale, w.offset);
            float* to = out + row * k;
            for (int64_t i = 0; i < k / 16; ++i) {
                const float scale = w.scale[i], offset = w.offset[i];
                for (int j = 0; j < 16; ++j) to[16 * i + j] = scale * w.u[16 * i + j] - offset;
            }
        }
    }
    return failed;
}
