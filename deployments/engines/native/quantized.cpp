// What library.py calls: products with weights that stay in their file's blocks, plain unpacking, and the layers of a step.
//
// Compiled once per instruction set (building.py sets ISA); library.py chooses by the processor. Each has one arithmetic
// for every number of rows of x: a row's result never depends on its neighbours, bit for bit.

#include <omp.h>

#include "draws.h"
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

#include "decoder.h"

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
        char* own = tile_scratch.reserve(product_scratch_bytes(*matrix, m));
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

// y [m, rows] = x [m, columns] W^T + bias (or null), all in float32; 16 divides the columns.
extern "C" void JOINED(atelier_linear, ISA)(const float* weight, int64_t rows, int64_t columns, const float* bias,
                                            const float* x, int64_t m, float* y, int threads) {
    const Matrix matrix{F32, reinterpret_cast<const uint8_t*>(weight), nullptr, 0, rows, columns, 4 * columns};
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t first = 0; first < rows; first += kPiece) {
        const int64_t last = std::min(rows, first + kPiece);
        multiply_dense(matrix, first, last, FloatRows{const_cast<float*>(x), columns}, m, y + first, rows);
        for (int64_t row = 0; bias && row < m; ++row)
            for (int64_t i = first; i < last; ++i) y[row * rows + i] += bias[i];
    }
}
