// Dot products straight from packed blocks, for AVX-512 with VNNI: each block is read once, unpacked in registers.
//
// An unpack buffer costs more than the product when x has few rows: this walk is bound by the reading of W. A format is
// a cursor over one row of W that gives 64 elements at a time as unsigned bytes u, with w = scale * (u - bias) - min.
// The bias is taken off in integers (Activations::lanes), so `dot` below is exact until a block's scale meets it.

#pragma once

#include "activations.h"

namespace {

#if defined(__AVX512VNNI__) && !defined(__AVX512BF16__)

inline __m256i load_32(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline __m512i halves(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

inline int16_t half_bits(const uint8_t* at) {
    int16_t bits;
    std::memcpy(&bits, at, 2);
    return bits;
}

// The f16 that begin `count` blocks of `BYTES` each, with zeros behind them.
template <int BYTES>
inline __m256 scales_of_blocks(const uint8_t* at, int count) {
    if (count == 8)
        return _mm256_cvtph_ps(_mm_setr_epi16(half_bits(at), half_bits(at + BYTES), half_bits(at + 2 * BYTES),
                                              half_bits(at + 3 * BYTES), half_bits(at + 4 * BYTES), half_bits(at + 5 * BYTES),
                                              half_bits(at + 6 * BYTES), half_bits(at + 7 * BYTES)));
    alignas(16) int16_t bits[8] = {};
    for (int i = 0; i < count; ++i) bits[i] = half_bits(at + i * BYTES);
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i*>(bits)));
}

// Each half shifted right by its own count; bits cross bytes, so mask afterwards.
template <int LOW, int HIGH>
inline __m512i shifted(__m256i bytes) {
    return halves(_mm256_srli_epi16(bytes, LOW), _mm256_srli_epi16(bytes, HIGH));
}

inline __m512 by_32(__m256 scales) { return _mm512_castps256_ps512(scales); }

inline __m512i lane_numbers(int step, bool by_32) {
    const __m512i sixteenths = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return by_32 ? _mm512_add_epi32(halves, _mm512_set1_epi32(2 * step))
                 : _mm512_add_epi32(sixteenths, _mm512_set1_epi32(4 * step));
}

// The shape of most cursors: `BYTES` a step of 256 elements, of which every 32 have a scale.
template <int BYTES>
struct RowBy32 {
    static constexpr int kBytes = BYTES;
    static constexpr bool kHasMins = false;
    const uint8_t* at;
    __m256 scale;
    void open(const Matrix& m, int64_t row) { at = m.data + row * m.row_bytes; }
    __m512 scales(__m256 dx) const { return by_32(_mm256_mul_ps(scale, dx)); }
    __m512i lanes(int step) const { return lane_numbers(step, true); }
    void leave() { at += kBytes; }
};

// Blocks of 32 that begin with their scale. A row may end with a single one of a step: the other half counts as zeros.
template <int BLOCK_BYTES>
struct BlockRow : RowBy32<8 * BLOCK_BYTES> {
    void enter(int num_blocks) { this->scale = scales_of_blocks<BLOCK_BYTES>(this->at, num_blocks); }
};

struct Q8Row : BlockRow<34> {
    static constexpr int kBias = 128;
    __m512i bytes(int step, bool is_half) const {
        const uint8_t* q = at + 68 * step + 2;
        const __m512i both = halves(load_32(q), is_half ? _mm256_setzero_si256() : load_32(q + 34));
        return _mm512_xor_si512(both, _mm512_set1_epi8(-128));
    }
};

struct Q4Row : BlockRow<18> {
    static constexpr int kBias = 8;
    __m512i bytes(int step, bool is_half) const {
        const uint8_t* q = at + 36 * step + 2;
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(is_half ? q : q + 18));
        // Each half of the register has its 16 bytes twice.
        const __m512i spread = halves(_mm256_broadcastsi128_si256(low), _mm256_broadcastsi128_si256(high));
        const __m512i counts = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
        return _mm512_and_si512(_mm512_srlv_epi64(spread, counts), _mm512_set1_epi8(15));
    }
};

// int8 with groups of 64 times a power of two, so that a step has one scale.
struct GroupRow : RowBy32<256> {
    static constexpr int kBias = 128;
    const float* all_scales;
    int64_t step;
    int shift;
    void open(const Matrix& m, int64_t row) {
        RowBy32::open(m, row);
        all_scales = m.scales;
        step = row * m.columns / 64;
        shift = __builtin_ctzll(m.group / 64);
    }
    void enter(int num_blocks) {
        alignas(16) float four[4] = {};
        for (int i = 0; i < num_blocks / 2; ++i) four[i] = all_scales[(step + i) >> shift];
        const __m128 each = _mm_load_ps(four);
        scale = _mm256_set_m128(_mm_unpackhi_ps(each, each), _mm_unpacklo_ps(each, each));
    }
    __m512i bytes(int i, bool) const {
        return _mm512_xor_si512(_mm512_loadu_si512(at + 64 * i), _mm512_set1_epi8(-128));
    }
    void leave() {
        RowBy32::leave();
        step += 4;
    }
};

template <bool IS_Q5>
struct Q45KRow : RowBy32<IS_Q5 ? 176 : 144> {
    static constexpr int kBias = 0;
    static constexpr bool kHasMins = true;
    __m512 min;  // by 16, each twice
    void enter(int) {
        const uint8_t* at = this->at;
        const uint32_t first = word(at + 4), second = word(at + 8), third = word(at + 12);
        const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f;
        const uint32_t high_scales = (third & four) | (first >> 6 & 0x03030303) << 4;
        const uint32_t high_mins = (third >> 4 & four) | (second >> 6 & 0x03030303) << 4;
        const int64_t scales = static_cast<int64_t>(static_cast<uint64_t>(high_scales) << 32 | (first & six));
        const int64_t mins = static_cast<int64_t>(static_cast<uint64_t>(high_mins) << 32 | (second & six));
        const __m128i doubled = _mm_unpacklo_epi8(_mm_cvtsi64_si128(mins), _mm_cvtsi64_si128(mins));
        const __m256 eight = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(scales)));
        this->scale = _mm256_mul_ps(_mm256_set1_ps(half(at)), eight);
        min = _mm512_mul_ps(_mm512_set1_ps(half(at + 2)), _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(doubled)));
    }
    __m512i bytes(int i, bool) const {
        const uint8_t* at = this->at;
        const __m512i both = _mm512_broadcast_i64x4(load_32(at + (IS_Q5 ? 48 : 16) + 32 * i));
        const __m512i low = _mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4));
        if (!IS_Q5) return _mm512_and_si512(low, _mm512_set1_epi8(15));
        const __m256i pair = _mm256_srl_epi16(load_32(at + 16), _mm_cvtsi32_si128(2 * i));
        const __m512i high = _mm512_slli_epi16(_mm512_and_si512(shifted<0, 1>(pair), _mm512_set1_epi8(1)), 4);
        return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)), high);
    }
};

struct Q6KRow {
    static constexpr int kBias = 32, kBytes = 210;
    static constexpr bool kHasMins = false;
    const uint8_t* at;
    __m512 scale;  // by 16
    void open(const Matrix& m, int64_t row) { at = m.data + row * m.row_bytes; }
    void enter(int) {
        const __m128i sixteen = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 192));
        scale = _mm512_mul_ps(_mm512_set1_ps(half(at + 208)), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(sixteen)));
    }
    __m512 scales(__m256 dx) const {
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return _mm512_mul_ps(scale, _mm512_permutexvar_ps(twice, by_32(dx)));
    }
    __m512i lanes(int i) const { return lane_numbers(i, false); }
    __m512i bytes(int i, bool) const {
        const __m512i low = _mm512_srl_epi16(_mm512_loadu_si512(at + i / 2 * 64), _mm_cvtsi32_si128(i % 2 * 4));
        const __m256i bits = _mm256_srl_epi16(load_32(at + 128 + i / 2 * 32), _mm_cvtsi32_si128(i % 2 * 4));
        const __m512i high = _mm512_slli_epi16(_mm512_and_si512(shifted<0, 2>(bits), _mm512_set1_epi8(3)), 4);
        return _mm512_or_si512(_mm512_and_si512(low, _mm512_set1_epi8(15)), high);
    }
    void leave() { at += kBytes; }
};

// R rows of W times C rows of x. Each result has lanes of its own, so R and C do not change it.
template <class Row, int R, int C>
void dot_packed(const Matrix& m, int64_t row, const Activations& x, int64_t column, float (&out)[R][C]) {
    // A single row is a walk straight on through memory: 64 lines ahead. More rows go on at as many behind them.
    const int64_t ahead = R == 1 ? 4096 : R * m.row_bytes;
    Row rows[R];
    for (int r = 0; r < R; ++r) rows[r].open(m, row + r);
    __m512 acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = _mm512_setzero_ps();
    const auto take = [&](int64_t i, int num_blocks) __attribute__((always_inline)) {
        __m512 scales[R][C];
        for (int r = 0; r < R; ++r) {
            for (int line = 0; line < Row::kBytes; line += 64)
                _mm_prefetch(reinterpret_cast<const char*>(rows[r].at + ahead + line), _MM_HINT_T0);
            rows[r].enter(num_blocks);
            for (int c = 0; c < C; ++c)
                scales[r][c] = rows[r].scales(_mm256_loadu_ps(x.scale + ((column + c) * x.stride + i) / 32));
        }
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
            if (2 * step >= num_blocks) break;
            __m512i q[C], start[C];
            for (int c = 0; c < C; ++c) {
                const int64_t at = (column + c) * x.stride + i + 64 * step;
                q[c] = _mm512_loadu_si512(x.q + at);
                start[c] = _mm512_setzero_si512();
                if constexpr (Row::kBias)
                    start[c] = _mm512_slli_epi32(_mm512_loadu_si512(x.lanes + at / 4), __builtin_ctz(Row::kBias));
            }
            for (int r = 0; r < R; ++r) {
                const __m512i u = rows[r].bytes(step, 2 * step + 1 == num_blocks);
                for (int c = 0; c < C; ++c) {
                    const __m512 dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start[c], u, q[c]));
                    const __m512 each = _mm512_permutexvar_ps(rows[r].lanes(step), scales[r][c]);
                    acc[r][c] = _mm512_fmadd_ps(dot, each, acc[r][c]);
                }
            }
        }
        for (int r = 0; r < R; ++r) {
            if constexpr (Row::kHasMins)
                for (int c = 0; c < C; ++c) {
                    const __m512 sums = _mm512_loadu_ps(x.sum + ((column + c) * x.stride + i) / 16);
                    acc[r][c] = _mm512_fnmadd_ps(rows[r].min, sums, acc[r][c]);
                }
            rows[r].leave();
        }
    };
    int64_t i = 0;
    for (; i + 256 <= m.columns; i += 256) take(i, 8);
    if (i < m.columns) take(i, static_cast<int>((m.columns - i) / 32));
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) out[r][c] = _mm512_reduce_add_ps(acc[r][c]);
}

template <class Row, int R>
void dot_packed_rows(const Matrix& m, int64_t row, const Activations& x, int64_t num_columns, void* y, int element) {
    int64_t column = 0;
    for (; column + 4 <= num_columns; column += 4) {
        float out[R][4];
        dot_packed<Row, R, 4>(m, row, x, column, out);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < 4; ++c) store_element(y, element, (column + c) * m.rows + row + r, out[r][c]);
    }
    for (; column < num_columns; ++column) {
        float out[R][1];
        dot_packed<Row, R, 1>(m, row, x, column, out);
        for (int r = 0; r < R; ++r) store_element(y, element, column * m.rows + row + r, out[r][0]);
    }
}

bool has_cursor(const Matrix& m) {
    if (m.type == GROUP_INT8) return m.columns % 64 == 0 && m.group % 64 == 0 && (m.group & (m.group - 1)) == 0;
    return m.type == Q8_0 || m.type == Q4_0 || m.type == Q4_K || m.type == Q5_K || m.type == Q6_K;
}

// One row of x: rows of W one after the other, at the speed of memory. More: four at a time share the loads of x.
template <class Row>
void walk_rows(const Matrix& m, int64_t first, int64_t last, const Activations& x, int64_t num_columns, void* y,
               int element) {
    int64_t row = first;
    for (; num_columns > 1 && row + 4 <= last; row += 4) dot_packed_rows<Row, 4>(m, row, x, num_columns, y, element);
    for (; row < last; ++row) dot_packed_rows<Row, 1>(m, row, x, num_columns, y, element);
}

// Rows `first` to `last` of W, of a format that has a cursor, times all of x.
void multiply_packed(const Matrix& m, int64_t first, int64_t last, const Activations& x, int64_t num_columns, void* y,
                     int element) {
    switch (m.type) {
        case Q8_0: return walk_rows<Q8Row>(m, first, last, x, num_columns, y, element);
        case Q4_0: return walk_rows<Q4Row>(m, first, last, x, num_columns, y, element);
        case Q4_K: return walk_rows<Q45KRow<false>>(m, first, last, x, num_columns, y, element);
        case Q5_K: return walk_rows<Q45KRow<true>>(m, first, last, x, num_columns, y, element);
        case Q6_K: return walk_rows<Q6KRow>(m, first, last, x, num_columns, y, element);
        case GROUP_INT8: return walk_rows<GroupRow>(m, first, last, x, num_columns, y, element);
    }
}

#else

bool has_cursor(const Matrix&) { return false; }

void multiply_packed(const Matrix&, int64_t, int64_t, const Activations&, int64_t, void*, int) {}

#endif

}  // namespace
