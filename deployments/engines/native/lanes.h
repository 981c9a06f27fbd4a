// Registers whose lanes are rows of W: 16 with AVX-512 and VNNI, 8 with AVX2. What is above (panels.h, panel_product.h) is
// written once, in these words; `&`, `|`, `*` and `-` are the compiler's own.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512VNNI__)

using Ints = __m512i;  // in a lane an int32, or four bytes that follow each other in a row
using Floats = __m512;
constexpr int kLanes = 16;
constexpr int kSignedBias = 128;  // what int8 have more as the products take them

inline Ints every_byte(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Ints every_int(int value) { return _mm512_set1_epi32(value); }
inline Floats every_float(float value) { return _mm512_set1_ps(value); }
inline Ints load(const uint8_t* at) { return _mm512_loadu_si512(at); }
inline Floats load(const float* at) { return _mm512_loadu_ps(at); }
inline Floats load(const uint16_t* bfloat16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bfloat16));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline void store(uint8_t* at, Ints bits) { _mm512_storeu_si512(at, bits); }
inline void store(float* at, Floats values) { _mm512_storeu_ps(at, values); }
inline Ints shift_up(Ints bits, int by) { return _mm512_slli_epi32(bits, by); }
inline Ints shift_down(Ints bits, int by) { return _mm512_srli_epi32(bits, by); }
inline Ints shift_down_signed(Ints bits, int by) { return _mm512_srai_epi32(bits, by); }
inline Ints sum(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
inline Ints product(Ints a, Ints b) { return _mm512_mullo_epi32(a, b); }
inline Floats to_floats(Ints numbers) { return _mm512_cvtepi32_ps(numbers); }
inline Floats as_floats(Ints bits) { return _mm512_castsi512_ps(bits); }
inline Floats add_product(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }  // a b + c
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a b
inline Floats low_half(Ints words) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words)); }
inline Ints from_signed(Ints bytes) { return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128)); }
inline Ints greater(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
inline Ints look_up(const int8_t (&values)[16], Ints nibbles) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), nibbles);
}

// The dot product of each lane's bytes, none above MOST, with those of x, in STEPS steps; `IS_ALONE`, there is no other.
template <int MOST, int STEPS, bool IS_ALONE = false>
struct Dot {
    Ints total;
    void begin(Ints start) { total = start; }
    void add(int, Ints u, Ints x) { total = _mm512_dpbusd_epi32(total, u, x); }
};

#else

using Ints = __m256i;
using Floats = __m256;
constexpr int kLanes = 8;
constexpr int kSignedBias = 0;

inline Ints every_byte(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
inline Ints every_int(int value) { return _mm256_set1_epi32(value); }
inline Floats every_float(float value) { return _mm256_set1_ps(value); }
inline Ints load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }
inline Floats load(const float* at) { return _mm256_loadu_ps(at); }
inline Floats load(const uint16_t* bfloat16) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(bfloat16));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline void store(uint8_t* at, Ints bits) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), bits); }
inline void store(float* at, Floats values) { _mm256_storeu_ps(at, values); }
inline Ints shift_up(Ints bits, int by) { return _mm256_slli_epi32(bits, by); }
inline Ints shift_down(Ints bits, int by) { return _mm256_srli_epi32(bits, by); }
inline Ints shift_down_signed(Ints bits, int by) { return _mm256_srai_epi32(bits, by); }
inline Ints sum(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
inline Ints product(Ints a, Ints b) { return _mm256_mullo_epi32(a, b); }
inline Floats to_floats(Ints numbers) { return _mm256_cvtepi32_ps(numbers); }
inline Floats as_floats(Ints bits) { return _mm256_castsi256_ps(bits); }
inline Floats add_product(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats subtract_product(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats low_half(Ints words) {
    const Ints halves = _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
    return _mm256_cvtph_ps(_mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1)));
}
inline Ints from_signed(Ints bytes) { return bytes; }
inline Ints greater(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
inline Ints look_up(const int8_t (&values)[16], Ints nibbles) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(values));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles);
}

// Pairs of products of bytes are int16: as many of them are added there as surely fit (x is 127 at most), and int8 gives
// its sign to x, for -128 x 127 x 2 fits once. All of it is exact. HAZARD: of several sums, GCC 12 delays the additions to
// make trees of them, and keeps all products in memory meanwhile: a third of the time. `settled` tells it to add at once.
template <int MOST, int STEPS, bool IS_ALONE = false>
struct Dot {
    static constexpr bool kIsSigned = MOST == 255;
    static constexpr int kSteps = kIsSigned ? 1 : 32767 / (2 * 127 * MOST) < STEPS ? 32767 / (2 * 127 * MOST) : STEPS;
    static_assert(STEPS % kSteps == 0);
    Ints total, pairs;
    static Ints settled(Ints sum) {
        if (!IS_ALONE) asm("" : "+x"(sum));
        return sum;
    }
    void begin(Ints start) { total = start; }
    void add(int step, Ints u, Ints x) {
        if constexpr (kIsSigned) {
            pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(u), _mm256_sign_epi8(x, u));
        } else {
            const Ints added = _mm256_maddubs_epi16(u, x);
            pairs = settled(step % kSteps ? _mm256_add_epi16(pairs, added) : added);
        }
        if (step % kSteps < kSteps - 1) return;
        total = _mm256_add_epi32(total, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        if (kIsSigned) total = settled(total);
    }
};

#endif

inline Floats high_half(Ints words) { return low_half(shift_down(words, 16)); }
inline Ints low_nibbles(Ints bytes) { return bytes & every_byte(15); }
inline Ints high_nibbles(Ints bytes) { return low_nibbles(shift_down(bytes, 4)); }

// Four elements of x in every lane.
inline Ints four_of(const int8_t* q) {
    int32_t four;
    std::memcpy(&four, q, 4);
    return every_int(four);
}

}  // namespace
