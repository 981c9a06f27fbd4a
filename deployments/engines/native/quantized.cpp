// What library.py calls: products with weights that stay in their file's blocks, plain unpacking, and the layers of a step.
//
// Compiled once per instruction set (building.py sets ISA); library.py chooses by the processor. Each has one arithmetic
// for every number of rows of x: a row's result never depends on its neighbours, bit for bit.

#include <omp.h>

#include <optional>

#include "draws.h"
#include "pair_product.h"
#include "panel_product.h"
#include "team.h"

namespace {

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

}  // namespace

#include "convolution.h"
#include "decoder.h"
#include "encoder.h"
#include "full_attention.h"
#include "gates.h"

namespace {

// Rows of x that meet all of W before the next: so many stay in the last cache.
constexpr int64_t kBlockRows = 64 * kDenseRows;
constexpr int64_t kMostColumns = 128;  // of y, whose rows of W a thread takes at a time

template <class Element>
int multiply_linear(const Matrix& matrix, const void* bias, const void* x, int64_t m, void* y, int threads) {
    constexpr int element = sizeof(Element) == 2 ? BFLOAT16 : FLOAT32;
    if (m == 0) return 0;
    const int64_t n = matrix.rows, k = matrix.columns, piece = n < 512 * threads ? 64 : kMostColumns;
    const int64_t pieces = (n + piece - 1) / piece;
    const int64_t even = m / ((m + kBlockRows - 1) / kBlockRows), block = (even / kDenseRows + 1) * kDenseRows;
    const DenseRows<Element> given{static_cast<Element*>(const_cast<void*>(x)), k, 0};
    const bool turns = sizeof(Element) == 2 && m >= kTurningRows;
    DenseRows<Element> turned{nullptr, (k + 31) / 32 * 32, 0};
    if (turns) {
        turned.values = reinterpret_cast<Element*>(activation_scratch.reserve(sizeof(Element) * block * turned.stride));
        if (!turned.values) return 1;
    }
    const size_t product_bytes = dense_scratch_bytes(given);
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char* memory = tile_scratch.reserve(product_bytes + 4 * block * piece);
        float* const own = reinterpret_cast<float*>(memory + product_bytes);
        if (!memory) {
#pragma omp atomic write
            failed = 1;
        }
        for (int64_t row = 0; row < m; row += block) {
            const int64_t count = std::min(block, m - row);
            DenseRows<Element> rows{given.values + row * k, k, 0};
            if constexpr (sizeof(Element) == 2)
                if (count >= kTurningRows) {
                    const HalfRows from = rows;
                    rows = HalfRows{turned.values, turned.stride, count};
#pragma omp for schedule(static)
                    for (int64_t tile = 0; tile < HalfTiles(count).count; ++tile) turn_tile(from.values, k, tile, rows);
                }
#pragma omp for schedule(dynamic, 1)
            for (int64_t i = 0; i < pieces; ++i) {
                if (!memory) continue;
                const int64_t first = i * piece, last = std::min(n, first + piece);
                multiply_dense(matrix, first, last, rows, count, own, piece, memory);
                float offsets[kMostColumns] = {};
                for (int64_t j = first; bias && j < last; ++j) offsets[j - first] = load_element(bias, element, j);
                for (int64_t r = 0; r < count; ++r)
                    for (int64_t j = 0; j < last - first; j += kLanes)
                        store_lanes(y, element, (row + r) * n + first + j, std::min<int64_t>(kLanes, last - first - j),
                                    load(own + r * piece + j) + load(offsets + j));
            }
        }
    }
    return failed;
}

}  // namespace

#define JOINED_(a, b) a##_##b
#define JOINED(a, b) JOINED_(a, b)

// y [m, n] = x [m, k] W^T. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_matmul, ISA)(const Matrix* matrix, const void* x, int x_element, int64_t m, void* y,
                                           int y_element, int threads) {
    const int64_t n = matrix->rows, k = matrix->columns;
    Activations rows;
    rows.stride = padded(k);
    char* memory = activation_scratch.reserve(m * rows.stride * kActivationBytes);
    if (!memory) return 1;
    place_activations(memory, m, rows);
    std::atomic<int64_t> taken{0};
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < m; ++row) prepare_row(x, x_element, row, k, rows);
        char* own = tile_scratch.reserve(product_scratch_bytes(m));
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
        take_pieces(taken, own ? (n + kPiece - 1) / kPiece : 0, [&](int64_t piece, int64_t next) {
            const int64_t first = piece * kPiece, last = std::min(n, first + kPiece);
            multiply_rows(*matrix, first, last, rows, m, Output{y, y_element, n, 0}, own, NextRows{matrix, next * kPiece});
        });
    }
    return failed;
}

// Rows first to first + count of W as float32 [count, k]: exactly what gguf-py's dequantize gives, up to one rounding.
extern "C" int JOINED(atelier_unpack, ISA)(const Matrix* matrix, int64_t first, int64_t count, float* out, int threads) {
    const int64_t k = matrix->columns;
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
            uint8_t* u = reinterpret_cast<uint8_t*>(own);
            float *scales = reinterpret_cast<float*>(own + k), *offsets = scales + k / 16, *to = out + row * k;
            unpack_row(*matrix, first + row, u, scales, offsets);
            for (int64_t i = 0; i < k / 16; ++i) {
                const float scale = scales[i], offset = offsets[i];
                for (int j = 0; j < 16; ++j) to[16 * i + j] = scale * u[16 * i + j] - offset;
            }
        }
    }
    return failed;
}

// Block sums of e^((x - best) factor) of the rows of x [.., size] that `rows` names: sums [num_rows, blocks].
extern "C" void JOINED(atelier_exponential_sums, ISA)(const float* x, int64_t size, const int64_t* rows, int64_t num_rows,
                                                      const float* best, const float* factors, int64_t block,
                                                      double* sums, int threads) {
    const int64_t num_blocks = (size + block - 1) / block;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < num_rows; ++i)
        add_exponentials(x + rows[i] * size, size, block, best[i], factors[i], sums + i * num_blocks);
}

// Tokens [num_draws] that `draws` choose of their rows of x [.., size]; `maxima` [.., blocks] are those of all rows' blocks.
// Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_draw, ISA)(const float* x, int64_t size, const float* maxima, int64_t block,
                                         const DrawnRow* draws, int64_t num_draws, int64_t* tokens, int threads) {
    const int64_t num_blocks = (size + block - 1) / block;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < num_draws; ++i) {
        char* own = tile_scratch.reserve(DrawScratch::nbytes(size));
        const int64_t row = draws[i].row;
        if (own) {
            tokens[i] = draw_token(x + row * size, size, maxima + row * num_blocks, block, draws[i], own);
        } else {
#pragma omp atomic write
            failed = 1;
        }
    }
    return failed;
}

// Some layers of a step. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_decode, ISA)(const Decoder* decoder, const Step* step, int threads) {
    const Matrix& first = decoder->layers->q.weight;
#if defined(__AVX512VNNI__)
    if (first.type == BF16 && has_half_products()) return run_decoder<HalfRows>(*decoder, *step, threads);
#endif
    return (is_dense(first) ? run_decoder<FloatRows> : run_decoder<Activations>)(*decoder, *step, threads);
}

// The layers of an encoder, in an Element: bfloat16 where the processor multiplies pairs of them. Returns 0, or 1 when memory
// ran out.
extern "C" int JOINED(atelier_encode, ISA)(const Encoder* encoder, const Texts* texts, int element, int threads) {
#if defined(__AVX512VNNI__)
    if (element == BFLOAT16) return run_encoder<uint16_t>(*encoder, *texts, threads);
#endif
    return run_encoder<float>(*encoder, *texts, threads);
}

// y [m, rows] = x [m, columns] W^T + bias (or null), all float32, or all bfloat16 where the processor multiplies pairs of
// them; 16 divides the columns. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_linear, ISA)(const void* weight, int element, int64_t rows, int64_t columns,
                                           const void* bias, const void* x, int64_t m, void* y, int threads) {
    const bool is_half = element == BFLOAT16;
    const int64_t row_bytes = (is_half ? 2 : 4) * columns;
    const Matrix matrix{is_half ? BF16 : F32, static_cast<const uint8_t*>(weight), nullptr, 0, rows, columns, row_bytes};
#if defined(__AVX512VNNI__)
    if (is_half) return multiply_linear<uint16_t>(matrix, bias, x, m, y, threads);
#endif
    return multiply_linear<float>(matrix, bias, x, m, y, threads);
}

// y [m, n] += factor (x [m, k] down^T) up^T, all float32: down [rank, k], up [n, rank]; 4 divides k and the rank. Returns 0,
// or 1 when memory ran out.
extern "C" int JOINED(atelier_add_pair, ISA)(const float* down, const float* up, int64_t rank, int64_t k, int64_t n,
                                             const float* x, int64_t m, float factor, float* y, int threads) {
    const Matrix inner{F32, reinterpret_cast<const uint8_t*>(down), nullptr, 0, rank, k, 4 * k};
    const Matrix outer{F32, reinterpret_cast<const uint8_t*>(up), nullptr, 0, n, rank, 4 * rank};
    int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        char* own = tile_scratch.reserve(PairProduct::scratch_bytes(rank, k));
        if (!own) {
#pragma omp atomic write
            failed = 1;
        }
        std::optional<PairProduct> pair;
        if (own) pair.emplace(inner, outer, own);
#pragma omp for schedule(dynamic, 1)
        for (int64_t row = 0; row < m; row += kPairRows)
            if (pair) pair->add(x + row * k, std::min(kPairRows, m - row), factor, y + row * n);
    }
    return failed;
}

#if defined(__AVX512VNNI__)
// A convolution in an Element, where the processor multiplies pairs of bfloat16. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_convolve, ISA)(const Convolution* convolution, int element, int threads) {
    return (element == BFLOAT16 ? convolve<uint16_t> : convolve<float>)(*convolution, threads);
}

// Attention without a mask in bfloat16, where the processor multiplies pairs of it. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_attend, ISA)(const FullAttention* attention, int threads) {
    return attend_fully(*attention, threads);
}

// y [m, n] = the gated rows of x [m, 2 n], in bfloat16.
extern "C" void JOINED(atelier_gate, ISA)(const uint16_t* x, int64_t m, int64_t n, uint16_t* y, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (int64_t row = 0; row < m; ++row) gate_row(x + row * 2 * n, n, y + row * n);
}
#endif

// A product that is bound to its memory: of atelier_linear, or of atelier_add_pair if it has a rank.
struct Product {
    const void *weight, *beside, *x;  // beside: the bias or null, or the pair's `up`
    void* y;
    int64_t outputs, columns, m, rank;
    float factor;
    int32_t element;
};

// Some products, one after the other. Returns 0, or 1 when memory ran out.
extern "C" int JOINED(atelier_run, ISA)(const Product* products, int64_t count, int threads) {
    int failed = 0;
    for (const Product* p = products; p < products + count && !failed; ++p) {
        if (p->rank)
            failed = JOINED(atelier_add_pair, ISA)(static_cast<const float*>(p->weight), static_cast<const float*>(p->beside),
                                                   p->rank, p->columns, p->outputs, static_cast<const float*>(p->x), p->m,
                                                   p->factor, static_cast<float*>(p->y), threads);
        else
            failed = JOINED(atelier_linear, ISA)(p->weight, p->element, p->outputs, p->columns, p->beside, p->x, p->m, p->y,
                                                 threads);
    }
    return failed;
}
