// All layers of a Llama decoder (q/k norms and biases as Qwen's) for the tokens of a step, of completions and of prompts:
// activations in float32, attention over the paged KV cache (attention.h). Weights are all packed, and rows of x made int8
// for them (`Rows` is Activations, panel_product.h), or all float32 or bfloat16 (FloatRows or HalfRows, dense_product.h).
//
// One parallel region for the layers: with a token or a few, they are too small to begin one per product. The phases of
// a layer are handed out in pieces (Team). Every sum runs in an order of its own row's, whatever the other rows are.

#pragma once

#include <new>
#include <type_traits>
#include <vector>

#include "attention.h"
#include "half_panels.h"
#include "team.h"

namespace {

struct Linear {
    Matrix weight;
    const float* bias;  // or null
};

struct Layer {
    Linear q, k, v, output, gate, up, down;
    const float *attention_norm, *mlp_norm;
    const float *q_norm, *k_norm;  // by head, or null
    Slots slots;
};

struct Decoder {
    const Layer* layers;
    int64_t num_layers, hidden, intermediate, num_heads;
    CacheShape cache;
    float eps;
    int is_interleaved;
    const float* frequencies;  // [head_dim / 2], inverse ones of the rotary embedding
    float magnitude;
    const float* norm;  // behind the last layer
    Linear head;        // of no rows where it is not computed here
};

struct Step {
    int64_t num_rows, num_spans, first_layer, last_layer;  // the last one is not computed
    float* x;             // [rows, hidden]: embeddings or what the layer before gave, and behind the last, normalized ones
    float *cos, *sin;     // [rows, head_dim / 2], made with the first layer
    const Span* spans;    // of all rows, in their order; of one sequence, earlier tokens come first
    int64_t num_logits;   // of rows `logit_rows`, computed behind the last layer
    const int64_t* logit_rows;
    float* logits;  // [num_logits, rows of the head]
    // Of one of several ranks: makes `count` floats their sum over all ranks, and returns 0; null without others.
    int (*sum_ranks)(float*, int64_t count);
    int is_first_rank;  // what its x was before is in the sum, once
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
        x[a] = first * cos[i] - second * sin[i];
        x[b] = second * cos[i] + first * sin[i];
    }
}

// Returns the bytes of `m` rows, and places them when there is `memory`.
inline size_t place_rows(char* memory, int64_t m, Activations& to) {
    if (memory) place_activations(memory, m, to);
    return m * to.stride * kActivationBytes;
}

template <class Element>
size_t place_rows(char* memory, int64_t m, DenseRows<Element>& to) {
    to.values = reinterpret_cast<Element*>(memory);
    to.turned = sizeof(Element) == 2 && m >= kTurningRows ? m : 0;
    return m * to.stride * sizeof(Element);
}

// What the threads of a step share: all [rows, ...] in one piece of memory.
template <class Rows>
struct Buffers {
    float *q, *k, *v, *attended;
    Rows of_hidden, of_attended, of_intermediate, of_logits;

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, const Decoder& d, const Step& step) {
        size_t used = 0;
        const auto take = [&](size_t nbytes) {
            char* at = memory ? memory + used : nullptr;
            used += (nbytes + 63) / 64 * 64;
            return at;
        };
        const auto floats = [&](int64_t size) { return reinterpret_cast<float*>(take(4 * step.num_rows * size)); };
        const int64_t q_size = d.num_heads * d.cache.head_dim, kv_size = d.cache.num_kv_heads * d.cache.head_dim;
        q = floats(q_size);
        k = floats(kv_size);
        v = floats(kv_size);
        attended = floats(q_size);
        const auto rows = [&](int64_t m, int64_t size, Rows& to) {
            to.stride = padded(size);
            place_rows(take(place_rows(nullptr, m, to)), m, to);
        };
        rows(step.num_rows, d.hidden, of_hidden);
        rows(step.num_rows, q_size, of_attended);
        rows(step.num_rows, d.intermediate, of_intermediate);
        rows(step.num_logits, d.hidden, of_logits);
        return used;
    }
};

// A thread's own memory: of products, or of attention or a row.
struct Own {
    char* product;
    float* columns[2];  // [rows, kPiece]
    TileScratch tile;
    float* row;  // [hidden]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, const Decoder& d, const Step& step, int64_t tile_queries, size_t product_bytes) {
        const size_t columns_bytes = 4 * step.num_rows * kPiece;
        product = memory;
        for (int i = 0; memory && i < 2; ++i)
            columns[i] = reinterpret_cast<float*>(memory + product_bytes + i * columns_bytes);
        row = reinterpret_cast<float*>(memory);
        return std::max({product_bytes + 2 * columns_bytes, tile.place(memory, tile_queries, d.cache.head_dim),
                         static_cast<size_t>(4 * d.hidden)});
    }
};

// The bytes of scratch memory that products of a step take.
template <class Rows>
size_t product_bytes_of(const Step& step) {
    size_t nbytes;
    if constexpr (std::is_same_v<Rows, Activations>)
        nbytes = product_scratch_bytes(step.num_rows);
    else
        nbytes = dense_scratch_bytes(Rows{});
    return (nbytes + 63) / 64 * 64;
}

// Columns `first` to `last` of the product of x and W as [rows, kPiece], with the bias.
template <class Rows>
void apply(const Linear& linear, int64_t first, int64_t last, const Rows& x, int64_t rows, float* columns,
           const Own& own, const NextRows& next) {
    if constexpr (std::is_same_v<Rows, Activations>)
        multiply_rows(linear.weight, first, last, x, rows, Output{columns, FLOAT32, kPiece, first}, own.product, next);
    else
        multiply_dense(linear.weight, first, last, x, rows, columns, kPiece, own.product);
    for (int64_t row = 0; linear.bias && row < rows; ++row)
        for (int64_t i = first; i < last; ++i) columns[row * kPiece + i - first] += linear.bias[i];
}

// Calls `work` with a linear layer's place in `linears`, a piece of its rows, and where the thread's next piece lies. After
// the last pieces come the first ones of `after`, the next product: it would begin with memory that nobody fetched.
template <int N, class Work>
void share_products(Team& team, const Linear* const (&linears)[N], const Linear& after, const Work& work) {
    int64_t ends[N], count = 0;
    for (int i = 0; i < N; ++i) ends[i] = count += (linears[i]->weight.rows + kPiece - 1) / kPiece;
    const auto place = [&](int64_t piece, int& i) {
        while (piece >= ends[i]) ++i;
        return (piece - (i ? ends[i - 1] : 0)) * kPiece;
    };
    team.share(count, [&](int64_t piece, int64_t next) {
        int i = 0, j = 0;
        const int64_t first = place(piece, i);
        const int64_t then = next < count ? place(next, j) : std::min((next - count) * kPiece, after.weight.rows);
        const Matrix &weight = linears[i]->weight, &ahead = next < count ? linears[j]->weight : after.weight;
        work(i, first, std::min(first + kPiece, weight.rows), NextRows{&ahead, then});
    });
}

// Row number `from` of x [.., k] becomes row number `row`.
template <class Rows>
void prepare_row_of(const float* x, int64_t from, int64_t k, int64_t row, const Rows& to) {
    const typename Rows::Place place(to.turned, row);
    for (int64_t i = 0; i < to.stride / 32; ++i) prepare_group(x, FLOAT32, from * k + 32 * i, (from + 1) * k, place, i, to);
}

template <class Rows>
void normalize_rows(Team& team, const Decoder& d, const float* norm, const Step& step, const Rows& to, const Own& own) {
    team.share(step.num_rows, [&](int64_t row, int64_t) {
        normalize(step.x + row * d.hidden, norm, d.hidden, d.eps, own.row);
        prepare_row_of(own.row, 0, d.hidden, row, to);
    });
}

template <class Rows>
void run_attention(Team& team, const Decoder& d, const Layer& layer, const Step& step, const std::vector<Span>& tiles,
                   const Buffers<Rows>& b, const Own& own) {
    const int64_t size = d.cache.head_dim, kv_heads = d.cache.num_kv_heads, group = d.num_heads / kv_heads;
    const int64_t q_size = d.num_heads * size, kv_size = kv_heads * size;
    const auto num_tiles = static_cast<int64_t>(tiles.size());
    const auto place = [&](float* x, const float* norm, int64_t row) {
        if (norm) normalize(x, norm, size, d.eps, x);
        rotate(x, step.cos + row * size / 2, step.sin + row * size / 2, size, d.is_interleaved);
    };
    normalize_rows(team, d, layer.attention_norm, step, b.of_hidden, own);
    const Linear* const inputs[] = {&layer.q, &layer.k, &layer.v};
    float* const outputs[] = {b.q, b.k, b.v};
    share_products(team, inputs, layer.output, [&](int i, int64_t first, int64_t last, const NextRows& next) {
        apply(*inputs[i], first, last, b.of_hidden, step.num_rows, own.columns[0], own, next);
        const int64_t stride = inputs[i]->weight.rows;
        for (int64_t row = 0; row < step.num_rows; ++row)
            std::memcpy(outputs[i] + row * stride + first, own.columns[0] + row * kPiece, 4 * (last - first));
    });
    team.share(num_tiles * kv_heads, [&](int64_t piece, int64_t) {
        const Span& tile = tiles[piece / kv_heads];
        const int64_t head = piece % kv_heads;
        for (int64_t i = 0; i < tile.num_rows; ++i) {
            const int64_t row = tile.first_row + i, at = tile.vector_of(d.cache, tile.position + i, head);
            float *key = b.k + row * kv_size + head * size, *value = b.v + row * kv_size + head * size;
            place(key, layer.k_norm, row);
            store_vector(layer.slots.keys, layer.slots.key_scales, d.cache.element, at, size, key);
            store_vector(layer.slots.values, layer.slots.value_scales, d.cache.element, at, size, value);
        }
    });
    const float factor = 1.0f / std::sqrt(static_cast<float>(size));
    team.share(num_tiles * kv_heads, [&](int64_t piece, int64_t) {
        // The last tiles of a prompt take longest: they come first.
        const Span& tile = tiles[num_tiles - 1 - piece / kv_heads];
        const int64_t head = piece % kv_heads;
        const auto at = [&](int64_t i) {  // query number i of the tile
            return (tile.first_row + i / group) * q_size + (head * group + i % group) * size;
        };
        for (int64_t i = 0; i < tile.num_rows * group; ++i) {
            float* query = b.q + at(i);
            place(query, layer.q_norm, tile.first_row + i / group);
            for (int64_t j = 0; j < size; ++j) own.tile.queries[i * size + j] = query[j] * factor;
        }
        attend(d.cache, layer.slots, tile, head, group, own.tile);
        for (int64_t i = 0; i < tile.num_rows * group; ++i) {
            const float share = 1.0f / own.tile.total[i];
            for (int64_t j = 0; j < size; ++j) b.attended[at(i) + j] = own.tile.sums[i * size + j] * share;
        }
    });
    team.share(step.num_rows, [&](int64_t row, int64_t) { prepare_row_of(b.attended, row, q_size, row, b.of_attended); });
}

// x += W input, by pieces; of slices of W and input, x becomes the sum over all ranks.
template <class Rows>
void add_product(Team& team, const Linear& linear, const Linear& after, const Rows& input, const Step& step,
                 const Own& own, std::atomic<bool>& failed) {
    const Linear* const one[] = {&linear};
    const bool adds = !step.sum_ranks || step.is_first_rank;
    share_products(team, one, after, [&](int, int64_t first, int64_t last, const NextRows& next) {
        apply(linear, first, last, input, step.num_rows, own.columns[0], own, next);
        for (int64_t row = 0; row < step.num_rows; ++row)
            for (int64_t i = first; i < last; ++i) {
                float& x = step.x[row * linear.weight.rows + i];
                x = (adds ? x : 0.0f) + own.columns[0][row * kPiece + i - first];
            }
    });
    // HAZARD: all threads must see a failure at the same place: it is noted before they go on from here.
    if (step.sum_ranks)
        team.share(1, [&](int64_t, int64_t) {
            if (!failed && step.sum_ranks(step.x, step.num_rows * linear.weight.rows)) failed = true;
        });
}

template <class Rows>
void run_mlp(Team& team, const Decoder& d, const Layer& layer, const Step& step, const Buffers<Rows>& b, const Own& own) {
    static_assert(kPiece == 32, "a piece of columns is a group of activations");
    normalize_rows(team, d, layer.mlp_norm, step, b.of_hidden, own);
    const Linear* const gate[] = {&layer.gate};
    share_products(team, gate, layer.down, [&](int, int64_t first, int64_t last, const NextRows& next) {
        const Matrix& up = layer.up.weight;
        float *gates = own.columns[0], *ups = own.columns[1];
        apply(layer.gate, first, last, b.of_hidden, step.num_rows, gates, own, NextRows{&up, first});
        apply(layer.up, first, last, b.of_hidden, step.num_rows, ups, own, next);
        const Rows& to = b.of_intermediate;
        typename Rows::Place place(to.turned, 0);
        for (int64_t row = 0; row < step.num_rows; ++row, place.advance()) {
            for (int64_t i = row * kPiece; i < row * kPiece + last - first; ++i)
                gates[i] = gates[i] / (1.0f + exponential(-gates[i])) * ups[i];
            // Behind the last column, groups of zeros.
            const int64_t end = last < d.intermediate ? first / 32 + 1 : to.stride / 32;
            for (int64_t i = first / 32; i < end; ++i)
                prepare_group(gates, FLOAT32, row * kPiece + 32 * i - first, row * kPiece + last - first, place, i, to);
        }
    });
}

void make_angles(Team& team, const Decoder& d, const Step& step, const std::vector<Span>& tiles) {
    const int64_t half = d.cache.head_dim / 2;
    team.share(static_cast<int64_t>(tiles.size()), [&](int64_t piece, int64_t) {
        const Span& tile = tiles[piece];
        for (int64_t i = 0; i < tile.num_rows * half; ++i) {
            const float angle = static_cast<float>(tile.position + i / half) * d.frequencies[i % half];
            step.cos[tile.first_row * half + i] = std::cos(angle) * d.magnitude;
            step.sin[tile.first_row * half + i] = std::sin(angle) * d.magnitude;
        }
    });
}

template <class Rows>
void run_head(Team& team, const Decoder& d, const Step& step, const Buffers<Rows>& b, const Own& own) {
    team.share(step.num_rows, [&](int64_t row, int64_t) {
        float* x = step.x + row * d.hidden;
        normalize(x, d.norm, d.hidden, d.eps, x);
    });
    team.share(step.num_logits, [&](int64_t row, int64_t) {
        prepare_row_of(step.x, step.logit_rows[row], d.hidden, row, b.of_logits);
    });
    if (!step.num_logits) return;
    const Linear* const head[] = {&d.head};
    share_products(team, head, d.layers[0].q, [&](int, int64_t first, int64_t last, const NextRows& next) {
        apply(d.head, first, last, b.of_logits, step.num_logits, own.columns[0], own, next);
        for (int64_t row = 0; row < step.num_logits; ++row)
            std::memcpy(step.logits + row * d.head.weight.rows + first, own.columns[0] + row * kPiece, 4 * (last - first));
    });
}

// The spans of a step in tiles that attend at once.
std::vector<Span> tiles_of(const Step& step, int64_t tile_rows) {
    std::vector<Span> tiles;
    for (const Span* span = step.spans; span < step.spans + step.num_spans; ++span)
        for (int64_t i = 0; i < span->num_rows; i += tile_rows)
            tiles.push_back({span->first_row + i, std::min(tile_rows, span->num_rows - i), span->position + i, span->blocks});
    return tiles;
}

template <class Rows>
int run_decoder(const Decoder& d, const Step& step, int threads) {
    Buffers<Rows> buffers;
    char* memory = activation_scratch.reserve(buffers.place(nullptr, d, step));
    if (!memory) return 1;
    buffers.place(memory, d, step);
    const size_t product_bytes = product_bytes_of<Rows>(step);
    const int64_t group = d.num_heads / d.cache.num_kv_heads, tile_rows = std::max<int64_t>(1, kQueries / group);
    const std::vector<Span> tiles = tiles_of(step, tile_rows);
    std::atomic<bool> failed{false};
    Team* team = nullptr;
    alignas(64) char place[sizeof(Team)];
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
        team = new (place) Team(omp_get_num_threads());
        Own own;
        char* mine = tile_scratch.reserve(own.place(nullptr, d, step, tile_rows * group, product_bytes));
        if (mine)
            own.place(mine, d, step, tile_rows * group, product_bytes);
        else
            failed = true;
        team->share(0, [](int64_t, int64_t) {});
        if (!failed && step.first_layer == 0) make_angles(*team, d, step, tiles);
        for (int64_t i = step.first_layer; !failed && i < step.last_layer; ++i) {
            const Layer& layer = d.layers[i];
            run_attention(*team, d, layer, step, tiles, buffers, own);
            add_product(*team, layer.output, layer.gate, buffers.of_attended, step, own, failed);
            run_mlp(*team, d, layer, step, buffers, own);
            const Linear& after = i + 1 < step.last_layer ? d.layers[i + 1].q : layer.down;
            add_product(*team, layer.down, after, buffers.of_intermediate, step, own, failed);
        }
        if (!failed && step.last_layer == d.num_layers) run_head(*team, d, step, buffers, own);
    }
    return failed;
}

}  // namespace
