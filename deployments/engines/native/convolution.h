// Convolutions of images [n, in, height, width] with weights [out, in, 3, 3] or [out, in, 1, 1], both where they lie, in
// float32 or by pairs of bfloat16, with sums in float32. Lanes are pixels, so that what is read and what is written is a
// row of an image. A word is what a lane takes at once: a float, or a pixel of two channels in bfloat16.
// A block of pixels meets a piece of the outputs, some inputs at a time, of which the words of both are packed into a
// thread's memory. A sum has the same order wherever its pixel lies: that of the inputs, those packed at once alone first.

#pragma once

#include "activations.h"
#include "lanes.h"

namespace {

// x, y and weight are contiguous. `bias` may be null.
struct Convolution {
    const void *weight, *bias, *x;
    void* y;
    int64_t images, inputs, height, width, outputs, kernel, stride, padding;
    int64_t out_height() const { return (height + 2 * padding - kernel) / stride + 1; }
    int64_t out_width() const { return (width + 2 * padding - kernel) / stride + 1; }
};

}  // namespace

#if defined(__AVX512VNNI__)

namespace {

constexpr int kTileOutputs = 6, kTileVectors = 4;  // as many sums as leave registers for what they are made of
constexpr int64_t kPieceOutputs = 32 * kTileOutputs;
constexpr int64_t kBlockPixels = 512;
constexpr int64_t kPackedWords = 144;  // of an output, at once: with them a tile's pixels stay in the first cache
// Up to so many pixels of an image, to pack weights takes longer than what they meet; so many more words are met at once,
// and in smaller blocks, that their pixels stay in the second cache.
constexpr int64_t kFewPixels = 64, kPlainWords = 576, kPlainBlockPixels = 128;

constexpr int64_t divided_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// The words of a pixel that an output meets, in groups: the 9 of a channel word where the kernel is 3 x 3, else 16 channel
// words. Blocks are bands of rows of an image, or several small images.
// A plain plan packs no weights: its words are those of an output where they lie, of channels and taps in that order, and
// each has its pixels.
template <class Element>
struct ConvolutionPlan {
    static constexpr int64_t kChannels = 4 / sizeof(Element);  // of a word

    const Convolution& given;
    int64_t out_height, out_width, taps, group_words, groups, chunk_groups, chunk_copied_words;
    int64_t band_rows, bands, block_bands, blocks, band_vectors, block_vectors;
    int64_t copy_rows, band_words, copies, copy_words, piece_outputs;
    bool is_plain;

    explicit ConvolutionPlan(const Convolution& c) : given(c) {
        out_height = c.out_height(), out_width = c.out_width();
        taps = c.kernel * c.kernel;
        is_plain = out_height * out_width <= kFewPixels && c.outputs >= kTileOutputs && c.inputs * taps % (16 * kChannels) == 0;
        const bool has_point_words = is_plain || taps == 1;
        const int64_t words = divided_up(c.inputs * (is_plain ? taps : 1), kChannels);  // that have pixels of their own
        group_words = has_point_words ? 16 : taps;
        groups = has_point_words ? divided_up(words, 16) : words;
        const int64_t most_groups = (is_plain ? kPlainWords : kPackedWords) / group_words;
        chunk_groups = divided_up(groups, divided_up(groups, most_groups));
        chunk_copied_words = has_point_words ? 16 * chunk_groups : chunk_groups;
        const int64_t block_pixels = is_plain ? kPlainBlockPixels : kBlockPixels;
        const int64_t most_rows = std::clamp<int64_t>(block_pixels / out_width, 1, out_height);
        band_rows = divided_up(out_height, divided_up(out_height, most_rows));
        const int64_t image_bands = divided_up(out_height, band_rows);
        bands = c.images * image_bands;
        block_bands = image_bands > 1 ? 1 : std::clamp<int64_t>(block_pixels / (out_height * out_width), 1, c.images);
        blocks = divided_up(bands, block_bands);
        band_vectors = divided_up(band_rows * out_width, 16);
        block_vectors = divided_up(block_bands * band_vectors, kTileVectors) * kTileVectors;
        // Of stride 1 a kernel's rows are rows of one copy.
        copies = is_plain ? 1 : c.stride == 1 ? c.kernel : taps;
        copy_rows = band_rows + (!is_plain && c.stride == 1 ? c.kernel - 1 : 0);
        band_words = divided_up(copy_rows * out_width, 16) * 16 + 16;
        // An odd number of lines. HAZARD: copies that lay a power of two apart would meet in the same sets of a cache.
        copy_words = (block_bands * band_words / 16 | 1) * 16;
        piece_outputs = is_plain ? divided_up(c.outputs, kTileOutputs) * kTileOutputs : kPieceOutputs;
    }
    int64_t offset_of(int64_t word) const {
        if (group_words == 16) return word * copy_words;
        const int64_t row = word / given.kernel, column = word % given.kernel;
        return given.stride == 1 ? column * copy_words + row * out_width : word * copy_words;
    }
    int64_t group_stride() const { return (group_words == 16 ? 16 : copies) * copy_words; }
    int64_t x_words() const { return chunk_copied_words * copies * copy_words + 64; }
    int64_t weight_words() const { return is_plain ? 0 : kPieceOutputs * kPackedWords + 16; }
    int64_t sum_words() const { return piece_outputs * 16 * block_vectors; }
    size_t scratch_bytes() const { return 4 * (x_words() + weight_words() + sum_words()); }
};

inline __mmask32 lanes_from_to(int64_t begin, int64_t end) {
    const auto below = [](int64_t n) { return n <= 0 ? 0u : n >= 32 ? ~0u : (1u << n) - 1; };
    return below(end) & ~below(begin);
}

// 16 pixels that lie S elements apart, in the low bits of words: those that a row has by the mask.
template <int S>
inline __m512i row_pixels(const float* row, int64_t at, __mmask32 mask) {
    const __m512i low = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), row + at);
    if constexpr (S == 1) return low;
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i high = _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask >> 16), row + at + 16);
    return _mm512_permutex2var_epi32(low, even, high);
}
template <int S>
inline __m512i row_pixels(const uint16_t* row, int64_t at, __mmask32 mask) {
    if constexpr (S == 1) return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(static_cast<__mmask16>(mask), row + at));
    return _mm512_maskz_loadu_epi16(mask & 0x55555555u, row + at);
}

// Their words, of a row of each channel, which may be null.
template <int S>
inline __m512i pixel_words(const float* const (&rows)[1], int64_t at, __mmask32 mask) {
    return row_pixels<S>(rows[0], at, mask);
}
template <int S>
inline __m512i pixel_words(const uint16_t* const (&rows)[2], int64_t at, __mmask32 mask) {
    const __m512i low = row_pixels<S>(rows[0], at, mask);
    return rows[1] ? low | _mm512_slli_epi32(row_pixels<S>(rows[1], at, mask), 16) : low;
}

// Pack a channel word of a band: as many copies as it has, of the pixels that a column of the kernel meets (or, with a
// stride, a tap), in rows as long as the result's.
template <int S, class Element>
void pack_band(const ConvolutionPlan<Element>& plan, int64_t image, int64_t first_row, int64_t word, float* to) {
    const Convolution& c = plan.given;
    constexpr int64_t kChannels = ConvolutionPlan<Element>::kChannels;
    const int64_t size = c.height * c.width, channel = word * kChannels;
    const Element* const x = static_cast<const Element*>(c.x) + (image * c.inputs + channel) * size;
    for (int64_t copy = 0; copy < plan.copies; ++copy, to += plan.copy_words) {
        const int64_t top = S * first_row + (S == 1 ? 0 : copy / c.kernel) - c.padding;
        const int64_t left = (S == 1 ? copy : copy % c.kernel) - c.padding;
        for (int64_t column = 0; column < plan.out_width; column += 16) {
            const int64_t at = S * column + left;
            const __mmask32 mask = lanes_from_to(-at, c.width - at);
            const auto written = static_cast<__mmask16>(lanes_from_to(0, plan.out_width - column));
            float* row_to = to + column;
            for (int64_t y = top; y < top + S * plan.copy_rows; y += S, row_to += plan.out_width) {
                __m512i words = _mm512_setzero_si512();
                if (0 <= y && y < c.height && channel < c.inputs) {
                    const Element* rows[kChannels] = {x + y * c.width};
                    if (kChannels == 2) rows[kChannels - 1] = channel + 1 < c.inputs ? rows[0] + size : nullptr;
                    words = pixel_words<S>(rows, at, mask);
                }
                _mm512_mask_storeu_epi32(row_to, written, words);
            }
        }
    }
}

// Pack the pixels of a word of a plain plan: each of its elements is of a channel and a tap.
template <int S, class Element>
void pack_plain_band(const ConvolutionPlan<Element>& plan, int64_t image, int64_t first_row, int64_t word, float* to) {
    const Convolution& c = plan.given;
    constexpr int64_t kChannels = ConvolutionPlan<Element>::kChannels;
    for (int64_t i = 0; i < kChannels; ++i) {
        const int64_t channel = (word * kChannels + i) / plan.taps, tap = (word * kChannels + i) % plan.taps;
        const int64_t top = S * first_row + tap / c.kernel - c.padding, left = tap % c.kernel - c.padding;
        const Element* const x = static_cast<const Element*>(c.x) + (image * c.inputs + channel) * c.height * c.width;
        for (int64_t column = 0; column < plan.out_width; column += 16) {
            const int64_t at = S * column + left;
            const __mmask32 mask = lanes_from_to(-at, c.width - at);
            const auto written = static_cast<__mmask16>(lanes_from_to(0, plan.out_width - column));
            float* row_to = to + column;
            for (int64_t row = 0, y = top; row < plan.band_rows; ++row, y += S, row_to += plan.out_width) {
                const bool is_there = 0 <= y && y < c.height;
                __m512i words = is_there ? row_pixels<S>(x + y * c.width, at, mask) : _mm512_setzero_si512();
                if (i > 0) words = _mm512_slli_epi32(words, 16) | _mm512_maskz_loadu_epi32(written, row_to);
                _mm512_mask_storeu_epi32(row_to, written, words);
            }
        }
    }
}

// The words of a group of an output, of which `mask` are there.
template <bool IS_POINT>
inline __m512i weight_words(const uint16_t* group, __mmask32 mask) {
    const __m512i given = _mm512_maskz_loadu_epi16(mask, group);
    if constexpr (IS_POINT) return given;
    const __m512i order = _mm512_setr_epi32(9 << 16, 10 << 16 | 1, 11 << 16 | 2, 12 << 16 | 3, 13 << 16 | 4, 14 << 16 | 5,
                                            15 << 16 | 6, 16 << 16 | 7, 17 << 16 | 8, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_permutexvar_epi16(order, given);
}
template <bool IS_POINT>
inline __m512i weight_words(const float* group, __mmask32 mask) {
    return _mm512_maskz_loadu_epi32(static_cast<__mmask16>(mask), group);
}

// Where some groups of the outputs' weights lie.
template <class Element, bool IS_POINT>
struct WeightRows {
    static constexpr int64_t kWords = IS_POINT ? 16 : 9, kElements = kWords * 4 / sizeof(Element);
    const Element* at;
    int64_t stride, left;  // elements of a row, and from its first group on
    WeightRows(const Convolution& c, int64_t output, int64_t group) : stride(c.inputs * c.kernel * c.kernel) {
        at = static_cast<const Element*>(c.weight) + output * stride + group * kElements;
        left = stride - group * kElements;
    }
    // Pack the groups of a tile, of whose outputs `outputs` are there: [groups][outputs of a tile][words]. HAZARD: what is
    // written behind a group's words is overwritten by the next.
    void pack(int64_t outputs, int64_t groups, float* to) const {
        for (int64_t group = 0; group < groups; ++group) {
            const __mmask32 mask = lanes_from_to(0, std::min(kElements, left - group * kElements));
            const Element* row = at + group * kElements;
            for (int64_t r = 0; r < kTileOutputs; ++r, to += kWords, row += stride)
                _mm512_storeu_si512(to, r < outputs ? weight_words<IS_POINT>(row, mask) : _mm512_setzero_si512());
        }
    }
    // Fetch the groups meanwhile.
    void fetch(int64_t outputs, int64_t groups) const {
        const int64_t nbytes = sizeof(Element) * std::min(left, groups * kElements);
        for (int64_t r = 0; r < outputs; ++r)
            for (int64_t byte = 0; byte < nbytes + 63; byte += 64)
                _mm_prefetch(reinterpret_cast<const char*>(at + r * stride) + byte, _MM_HINT_T1);
    }
};

inline __attribute__((target("avx512bf16"), always_inline)) Floats add_words(Floats total, Floats x, Floats w, uint16_t) {
    return _mm512_dpbf16_ps(total, (__m512bh)x, (__m512bh)w);
}
inline __attribute__((target("avx512bf16"), always_inline)) Floats add_words(Floats total, Floats x, Floats w, float) {
    return _mm512_fmadd_ps(x, w, total);
}

// Words of a tile's outputs, packed: groups of W of each output.
template <int W>
struct PackedWeights {
    static constexpr int kWords = W;
    const float* at;
    float word(int r, int i) const { return at[r * W + i]; }
    void next() { at += kTileOutputs * W; }
};

// The same where they lie, in rows so many words apart; those of the tile that follows are fetched meanwhile.
struct PlainWeights {
    static constexpr int kWords = 16;
    const float *at, *ahead;
    int64_t stride;
    float word(int r, int i) const {
        float found;
        std::memcpy(&found, (r < 3 ? at : at + 3 * stride) + r % 3 * stride + i, 4);
        return found;
    }
    void next() {
        for (int r = 0; r < kTileOutputs; ++r) _mm_prefetch(reinterpret_cast<const char*>(ahead + r * stride), _MM_HINT_T0);
        at += 16, ahead += 16;
    }
};

// A tile: words of each of kTileOutputs outputs times those of V vectors of pixels, in some groups.
template <class Element, int V, class Weights>
__attribute__((target("avx512bf16"))) void convolve_tile(Weights w, const float* const* x, const int64_t* offsets,
                                                         int64_t groups, int64_t group_stride, bool is_first, float* to,
                                                         int64_t stride) {
    Floats total[kTileOutputs][V];
#pragma GCC unroll 6
    for (int r = 0; r < kTileOutputs; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) total[r][v] = _mm512_setzero_ps();
    const float* at[V];
    for (int v = 0; v < V; ++v) at[v] = x[v];
    for (int64_t g = 0; g < groups; ++g, w.next()) {
#pragma GCC unroll 16
        for (int i = 0; i < Weights::kWords; ++i) {
            const int64_t offset = offsets[i];
            Floats xs[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) xs[v] = load(at[v] + offset);
#pragma GCC unroll 6
            for (int r = 0; r < kTileOutputs; ++r) {
                const Floats ws = _mm512_set1_ps(w.word(r, i));
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) total[r][v] = add_words(total[r][v], xs[v], ws, Element{});
            }
        }
        for (int v = 0; v < V; ++v) at[v] += group_stride;
    }
#pragma GCC unroll 6
    for (int r = 0; r < kTileOutputs; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
            float* place = to + r * stride + 16 * v;
            store(place, is_first ? total[r][v] : load(place) + total[r][v]);
        }
}

inline __attribute__((target("avx512bf16"))) void store_pixels(const float* from, int64_t count, float bias, float* to) {
    for (int64_t i = 0; i < count; i += 16)
        _mm512_mask_storeu_ps(to + i, static_cast<__mmask16>(lanes_from_to(0, count - i)), load(from + i) + every_float(bias));
}
inline __attribute__((target("avx512bf16"))) void store_pixels(const float* from, int64_t count, float bias, uint16_t* to) {
    for (int64_t i = 0; i < count; i += 16)
        _mm256_mask_storeu_epi16(to + i, static_cast<__mmask16>(lanes_from_to(0, count - i)),
                                 (__m256i)_mm512_cvtneps_pbh(load(from + i) + every_float(bias)));
}

// The outputs `first` to `last` of a block of pixels.
template <class Element, int W, bool IS_PLAIN>
void convolve_block(const ConvolutionPlan<Element>& plan, int64_t block, int64_t first, int64_t last, float* scratch) {
    const Convolution& c = plan.given;
    constexpr bool kIsPoint = W == 16;
    float *const x = scratch, *const w = x + plan.x_words(), *const sums = w + plan.weight_words();
    const int64_t stride = 16 * plan.block_vectors, image_bands = divided_up(plan.out_height, plan.band_rows);
    const int64_t first_band = block * plan.block_bands, bands = std::min(plan.block_bands, plan.bands - first_band);
    const int64_t vectors = bands * plan.band_vectors;
    int64_t offsets[W];
    for (int64_t i = 0; i < W; ++i) offsets[i] = plan.offset_of(i);
    const auto image_of = [&](int64_t band) { return (first_band + band) / image_bands; };
    const auto row_of = [&](int64_t band) { return (first_band + band) % image_bands * plan.band_rows; };
    for (int64_t group = 0; group < plan.groups; group += plan.chunk_groups) {
        const int64_t groups = std::min(plan.chunk_groups, plan.groups - group);
        const int64_t first_word = kIsPoint ? 16 * group : group, words = kIsPoint ? 16 * groups : groups;
        const auto pack = IS_PLAIN ? (c.stride == 1 ? pack_plain_band<1, Element> : pack_plain_band<2, Element>)
                                   : (c.stride == 1 ? pack_band<1, Element> : pack_band<2, Element>);
        for (int64_t word = 0; word < words; ++word)
            for (int64_t band = 0; band < bands; ++band) {
                float* to = x + word * plan.copies * plan.copy_words + band * plan.band_words;
                pack(plan, image_of(band), row_of(band), first_word + word, to);
            }
        const auto packed = [&](int64_t output) { return w + (output - first) * groups * W; };
        const auto outputs_of = [&](int64_t output) { return std::min<int64_t>(kTileOutputs, last - output); };
        if constexpr (!IS_PLAIN)
            for (int64_t output = first; output < last; output += kTileOutputs)
                WeightRows<Element, kIsPoint>(c, output, group).pack(outputs_of(output), groups, packed(output));
        for (int64_t vector = 0; vector < vectors; vector += kTileVectors) {
            const float* at[kTileVectors];
            for (int64_t v = 0; v < kTileVectors; ++v) {
                const int64_t number = std::min(vector + v, vectors - 1);
                at[v] = x + number / plan.band_vectors * plan.band_words + number % plan.band_vectors * 16;
            }
            const auto multiply = [&](auto weights, int64_t output) {
                using Weights = decltype(weights);
                const bool is_wide = vectors - vector > 2;
                const auto tile = is_wide ? convolve_tile<Element, 4, Weights> : convolve_tile<Element, 2, Weights>;
                tile(weights, at, offsets, groups, plan.group_stride(), group == 0,
                     sums + (output - first) * stride + 16 * vector, stride);
            };
            for (int64_t output = first; output < last; output += kTileOutputs) {
                if constexpr (IS_PLAIN) {
                    const int64_t row_words = 16 * plan.groups;
                    const auto row = [&](int64_t number) {  // an incomplete tile begins with outputs of the one before
                        const int64_t own = std::min(number, last - kTileOutputs);
                        return static_cast<const float*>(c.weight) + own * row_words + first_word;
                    };
                    const int64_t next = output + kTileOutputs;
                    const float* ahead = next < last ? row(next) : row(first) + 16 * groups;
                    multiply(PlainWeights{row(output), ahead, row_words}, output);
                } else {
                    if (vector == 0 && group + groups < plan.groups)
                        WeightRows<Element, kIsPoint>(c, output, group + groups).fetch(outputs_of(output), groups);
                    multiply(PackedWeights<W>{packed(output)}, output);
                }
            }
        }
    }
    const int64_t whole = (last - first) / kTileOutputs * kTileOutputs;
    const int64_t before = IS_PLAIN ? whole + kTileOutputs - (last - first) : 0;  // of an incomplete tile
    for (int64_t output = first; output < last; ++output)
        for (int64_t band = 0; band < bands; ++band) {
            const int64_t row = row_of(band), rows = std::min(plan.band_rows, plan.out_height - row);
            const float bias = c.bias ? load_element(c.bias, sizeof(Element) == 2 ? BFLOAT16 : FLOAT32, output) : 0;
            Element* to = static_cast<Element*>(c.y) +
                          ((image_of(band) * c.outputs + output) * plan.out_height + row) * plan.out_width;
            const int64_t place = output - first + (output - first < whole ? 0 : before);
            store_pixels(sums + place * stride + 16 * band * plan.band_vectors, rows * plan.out_width, bias, to);
        }
}

template <class Element>
int convolve(const Convolution& c, int threads) {
    const ConvolutionPlan<Element> plan(c);
    // With several threads, pieces that give each of them some.
    const int64_t even = divided_up(c.outputs, std::max<int64_t>(1, divided_up(2 * threads, plan.blocks)));
    const int64_t most = threads == 1 ? plan.piece_outputs : std::clamp<int64_t>(even, 4 * kTileOutputs, plan.piece_outputs);
    const int64_t piece = divided_up(divided_up(c.outputs, divided_up(c.outputs, most)), kTileOutputs) * kTileOutputs;
    const int64_t pieces = divided_up(c.outputs, piece);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        float* const own = reinterpret_cast<float*>(tile_scratch.reserve(plan.scratch_bytes()));
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < pieces * plan.blocks; ++i) {
            if (!own) continue;
            const int64_t first = i % pieces * piece, last = std::min(c.outputs, first + piece);
            const auto run = plan.is_plain    ? convolve_block<Element, 16, true>
                             : plan.taps == 1 ? convolve_block<Element, 16, false>
                                              : convolve_block<Element, 9, false>;
            run(plan, i / pieces, first, last, own);
        }
    }
    return failed;
}

}  // namespace

#endif
