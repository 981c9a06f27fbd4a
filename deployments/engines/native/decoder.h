// A decode step through all layers of a Llama decoder (q/k norms and biases as Qwen's): activations in float32, products
// as in quantized.cpp, attention over the blocks of the paged KV cache where they lie.
//
// One parallel region for the step: with a token or a few, layers are too small to begin one per product. The phases of
// a layer are handed out in pieces (Team). Every sum runs in an order of its own row's, whatever the other rows are.

#pragma once

#include <new>

#include "exponential.h"
#include "team.h"

namespace {

constexpr int kInt8 = 2;  // of the cache alone; FLOAT32 and BFLOAT16 are those of activations

struct Linear {
    Matrix weight;
    const float* bias;  // or null
};

struct Layer {
    Linear q, k, v, output, gate, up, down;
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // by head, or null
    void *keys, *values;           // of the cache: [slots, kv heads, head_dim]
    uint16_t *key_scales, *value_scales;  // of an int8 cache, in float16: [slots, kv heads]
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, block_size;
    float eps;
    int is_interleaved, cache_element;
};

// Row i is a token at `positions[i]` whose sequence has the blocks from `blocks + first_blocks[i]` on.
struct Step {
    int64_t num_rows;
    float* x;               // [rows, hidden]: embeddings, and what the last layer gives
    const float *cos, *sin;  // [rows, head_dim]
    const int64_t *positions, *first_blocks, *blocks;
};

inline void normalize(const float* x, const float* weight, int64_t size, float eps, float* out) {
    float squares = 0;
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += x[i] * x[i];
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) out[i] = x[i] * factor * weight[i];
}

inline void rotate(float* x, const float* cos, const float* sin, int64_t size, bool is_interleaved) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const int64_t a = is_interleaved ? 2 * i : i, b = is_interleaved ? 2 * i + 1 : i + half;
        const float first = x[a], second = x[b];
        x[a] = first * cos[a] - second * sin[a];
        x[b] = second * cos[b] + first * sin[b];
    }
}

// Vector number `row` of the cache, as float32. Int8 are kv_cache.py's: `scales` has one for each vector.
inline void load_vector(const void* from, const uint16_t* scales, int element, int64_t row, int64_t size, float* to) {
    if (element == FLOAT32) {
        std::memcpy(to, static_cast<const float*>(from) + row * size, 4 * size);
        return;
    }
    if (element == kInt8) {
        const int8_t* steps = static_cast<const int8_t*>(from) + row * size;
        const float scale = _cvtsh_ss(scales[row]);
        for (int64_t i = 0; i < size; ++i) to[i] = static_cast<float>(steps[i]) * scale;
        return;
    }
    const uint16_t* bits = static_cast<const uint16_t*>(from) + row * size;
    for (int64_t i = 0; i < size; ++i) {
        const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
        std::memcpy(to + i, &wide, 4);
    }
}

inline void store_vector(void* to, uint16_t* scales, int element, int64_t row, int64_t size, const float* from) {
    if (element != kInt8) {
        for (int64_t i = 0; i < size; ++i) store_element(to, element, row * size + i, from[i]);
        return;
    }
    float most = 0;
    for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(from[i]));
    scales[row] = _cvtss_sh(std::min(most / 127.0f, 65504.0f), _MM_FROUND_TO_NEAREST_INT);
    const float scale = _cvtsh_ss(scales[row]);
    int8_t* steps = static_cast<int8_t*>(to) + row * size;
    for (int64_t i = 0; i < size; ++i) {
        const float step = scale > 0 ? std::nearbyint(from[i] / scale) : 0.0f;
        steps[i] = static_cast<int8_t>(std::min(std::max(step, -127.0f), 127.0f));
    }
}

inline int64_t slot_of(const Decoder& d, const Step& step, int64_t row, int64_t position) {
    return step.blocks[step.first_blocks[row] + position / d.block_size] * d.block_size + position % d.block_size;
}

// The query heads of one key/value head of one row: out [group, head_dim]. `scratch`: a block's keys or values in
// float32, then the scores [group, length].
void attend(const Decoder& d, const Layer& layer, const Step& step, int64_t row, int64_t kv_head, const float* q,
            float* out, float* scratch) {
    const int64_t size = d.head_dim, group = d.num_heads / d.num_kv_heads, length = step.positions[row] + 1;
    float *block = scratch, *scores = scratch + d.block_size * size;
    const auto load_block = [&](const void* from, const uint16_t* scales, int64_t begin, int64_t count) {
        const int64_t first = slot_of(d, step, row, begin);
        for (int64_t t = 0; t < count; ++t) {
            const int64_t at = (first + t) * d.num_kv_heads + kv_head;
            load_vector(from, scales, d.cache_element, at, size, block + t * size);
        }
    };
    const float factor = 1.0f / std::sqrt(static_cast<float>(size));
    for (int64_t begin = 0; begin < length; begin += d.block_size) {
        const int64_t count = std::min(d.block_size, length - begin);
        load_block(layer.keys, layer.key_scales, begin, count);
        for (int64_t head = 0; head < group; ++head)
            for (int64_t t = 0; t < count; ++t) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t i = 0; i < size; ++i) sum += q[head * size + i] * block[t * size + i];
                scores[head * length + begin + t] = sum * factor;
            }
    }
    for (int64_t head = 0; head < group; ++head) {
        float* own = scores + head * length;
        float most = own[0], total = 0;
#pragma omp simd reduction(max : most)
        for (int64_t t = 0; t < length; ++t) most = std::max(most, own[t]);
#pragma omp simd reduction(+ : total)
        for (int64_t t = 0; t < length; ++t) total += own[t] = exponential(own[t] - most);
        const float share = 1.0f / total;
        for (int64_t t = 0; t < length; ++t) own[t] *= share;
    }
    std::memset(out, 0, 4 * group * size);
    for (int64_t begin = 0; begin < length; begin += d.block_size) {
        const int64_t count = std::min(d.block_size, length - begin);
        load_block(layer.values, layer.value_scales, begin, count);
        for (int64_t head = 0; head < group; ++head) {
            const float* shares = scores + head * length + begin;
            for (int64_t i = 0; i < size; i += 16) {  // head_dim is a multiple of 16
                float sums[16];
                std::memcpy(sums, out + head * size + i, sizeof sums);
                for (int64_t t = 0; t < count; ++t)
                    for (int j = 0; j < 16; ++j) sums[j] += shares[t] * block[t * size + i + j];
                std::memcpy(out + head * size + i, sums, sizeof sums);
            }
        }
    }
}

// What the threads of a step share: all [rows, ...] in one piece of memory.
struct Buffers {
    float *normal, *q, *k, *v, *attended, *added, *gate, *up;
    Activations of_hidden, of_attended, of_intermediate;

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, const Decoder& d, int64_t rows) {
        size_t used = 0;
        const auto take = [&](size_t nbytes) {
            char* at = memory ? memory + used : nullptr;
            used += (nbytes + 63) / 64 * 64;
            return at;
        };
        const auto floats = [&](int64_t size) { return reinterpret_cast<float*>(take(4 * rows * size)); };
        const int64_t q_size = d.num_heads * d.head_dim, kv_size = d.num_kv_heads * d.head_dim;
        normal = floats(d.hidden);
        q = floats(q_size);
        k = floats(kv_size);
        v = floats(kv_size);
        attended = floats(q_size);
        added = floats(d.hidden);
        gate = floats(d.intermediate);
        up = floats(d.intermediate);
        const auto activations = [&](int64_t size, Activations& to) {
            to.stride = padded(size);
            char* at = take(rows * to.stride * kActivationBytes);
            if (at) place_activations(at, rows, to);
        };
        activations(d.hidden, of_hidden);
        activations(q_size, of_attended);
        activations(d.intermediate, of_intermediate);
        return used;
    }
};

// Columns `first` to `last` of y [rows, rows of W], with the bias.
void apply(const Linear& linear, int64_t first, int64_t last, const Activations& x, int64_t rows, float* y, char* own,
           const uint8_t* next) {
    multiply_rows(linear.weight, first, last, x, rows, y, FLOAT32, own, next);
    for (int64_t row = 0; linear.bias && row < rows; ++row)
        for (int64_t i = first; i < last; ++i) y[row * linear.weight.rows + i] += linear.bias[i];
}

// Calls `work` with a linear layer's place in `linears`, a piece of its rows, and where the thread's next piece lies.
template <int N, class Work>
void share_products(Team& team, const Linear* const (&linears)[N], const Work& work) {
    int64_t ends[N], count = 0;
    for (int i = 0; i < N; ++i) ends[i] = count += (linears[i]->weight.rows + kPiece - 1) / kPiece;
    const auto place = [&](int64_t piece, int& i) {
        while (piece >= ends[i]) ++i;
        return (piece - (i ? ends[i - 1] : 0)) * kPiece;
    };
    team.share(count, [&](int64_t piece, int64_t next) {
        int i = 0, j = 0;
        const int64_t first = place(piece, i), then = place(std::min(next, count - 1), j);
        const Matrix &weight = linears[i]->weight, &after = linears[j]->weight;
        work(i, first, std::min(first + kPiece, weight.rows), after.data + then * after.row_bytes);
    });
}

void run_attention(Team& team, const Decoder& d, const Layer& layer, const Step& step, const Buffers& b, char* own) {
    const int64_t rows = step.num_rows, size = d.head_dim, group = d.num_heads / d.num_kv_heads;
    const int64_t q_size = d.num_heads * size, kv_size = d.num_kv_heads * size;
    team.share(rows, [&](int64_t row, int64_t) {
        normalize(step.x + row * d.hidden, layer.attention_norm, d.hidden, d.eps, b.normal + row * d.hidden);
        prepare_row(b.normal, FLOAT32, row, d.hidden, b.of_hidden);
    });
    const Linear* const inputs[] = {&layer.q, &layer.k, &layer.v};
    float* const outputs[] = {b.q, b.k, b.v};
    share_products(team, inputs, [&](int i, int64_t first, int64_t last, const uint8_t* next) {
        apply(*inputs[i], first, last, b.of_hidden, rows, outputs[i], own, next);
    });
    team.share(rows * d.num_kv_heads, [&](int64_t piece, int64_t) {
        const int64_t row = piece / d.num_kv_heads, head = piece % d.num_kv_heads;
        const float *cos = step.cos + row * size, *sin = step.sin + row * size;
        const auto place = [&](float* x, const float* norm) {
            if (norm) normalize(x, norm, size, d.eps, x);
            rotate(x, cos, sin, size, d.is_interleaved);
        };
        for (int64_t i = 0; i < group; ++i) place(b.q + row * q_size + (head * group + i) * size, layer.q_norm);
        float* key = b.k + row * kv_size + head * size;
        place(key, layer.k_norm);
        const int64_t at = slot_of(d, step, row, step.positions[row]) * d.num_kv_heads + head;
        store_vector(layer.keys, layer.key_scales, d.cache_element, at, size, key);
        store_vector(layer.values, layer.value_scales, d.cache_element, at, size, b.v + row * kv_size + head * size);
    });
    team.share(rows * d.num_kv_heads, [&](int64_t piece, int64_t) {
        const int64_t row = piece / d.num_kv_heads, head = piece % d.num_kv_heads;
        const int64_t at = row * q_size + head * group * size;
        attend(d, layer, step, row, head, b.q + at, b.attended + at, reinterpret_cast<float*>(own));
    });
    team.share(rows, [&](int64_t row, int64_t) { prepare_row(b.attended, FLOAT32, row, q_size, b.of_attended); });
}

// x += W input, by pieces.
void add_product(Team& team, const Linear& linear, const Activations& input, const Step& step, float* added, char* own) {
    const Linear* const one[] = {&linear};
    share_products(team, one, [&](int, int64_t first, int64_t last, const uint8_t* next) {
        apply(linear, first, last, input, step.num_rows, added, own, next);
        const int64_t size = linear.weight.rows;
        for (int64_t row = 0; row < step.num_rows; ++row)
            for (int64_t i = first; i < last; ++i) step.x[row * size + i] += added[row * size + i];
    });
}

void run_mlp(Team& team, const Decoder& d, const Layer& layer, const Step& step, const Buffers& b, char* own) {
    const int64_t rows = step.num_rows, size = d.intermediate;
    team.share(rows, [&](int64_t row, int64_t) {
        normalize(step.x + row * d.hidden, layer.mlp_norm, d.hidden, d.eps, b.normal + row * d.hidden);
        prepare_row(b.normal, FLOAT32, row, d.hidden, b.of_hidden);
    });
    const Linear* const gate[] = {&layer.gate};
    share_products(team, gate, [&](int, int64_t first, int64_t last, const uint8_t* next) {
        const Matrix& up = layer.up.weight;
        apply(layer.gate, first, last, b.of_hidden, rows, b.gate, own, up.data + first * up.row_bytes);
        apply(layer.up, first, last, b.of_hidden, rows, b.up, own, next);
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = row * size + first; i < row * size + last; ++i)
                b.gate[i] = b.gate[i] / (1.0f + exponential(-b.gate[i])) * b.up[i];
    });
    team.share(rows, [&](int64_t row, int64_t) { prepare_row(b.gate, FLOAT32, row, size, b.of_intermediate); });
}

int run_decoder(const Decoder& d, const Step& step, int threads) {
    Buffers buffers;
    char* memory = activation_scratch.reserve(buffers.place(nullptr, d, step.num_rows));
    if (!memory) return 1;
    buffers.place(memory, d, step.num_rows);
    int64_t longest = 0;
    for (int64_t row = 0; row < step.num_rows; ++row) longest = std::max(longest, step.positions[row] + 1);
    size_t own_bytes = 4 * (d.block_size * d.head_dim + d.num_heads / d.num_kv_heads * longest);
    for (int64_t i = 0; i < d.num_layers; ++i) {
        const Layer& layer = d.layers[i];
        for (const Linear* one : {&layer.q, &layer.k, &layer.v, &layer.output, &layer.gate, &layer.up, &layer.down})
            own_bytes = std::max(own_bytes, product_scratch_bytes(one->weight, step.num_rows));
    }
    std::atomic<bool> failed{false};
    Team* team = nullptr;
    alignas(64) char place[sizeof(Team)];
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team = new (place) Team(omp_get_num_threads());
        char* own = tile_scratch.reserve(own_bytes);
        if (!own) failed = true;
        team->share(0, [](int64_t, int64_t) {});
        for (int64_t i = 0; !failed && i < d.num_layers; ++i) {
            const Layer& layer = d.layers[i];
            run_attention(*team, d, layer, step, buffers, own);
            add_product(*team, layer.output, buffers.of_attended, step, buffers.added, own);
            run_mlp(*team, d, layer, step, buffers, own);
            add_product(*team, layer.down, buffers.of_intermediate, step, buffers.added, own);
        }
    }
    return failed;
}

}  // namespace
