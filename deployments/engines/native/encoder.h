// All layers of a BERT encoder for the tokens of some texts, without padding between them. Weights are float32 or bfloat16;
// what products take has the weights' element, all else is float32. The texts of a chunk go through all layers together.
//
// One parallel region for all of it, whose pieces the threads share (Team). Every sum runs in an order of its own row's,
// whatever other texts there are.

#pragma once

#include <vector>

#include "attention.h"
#include "dense_product.h"
#include "team.h"
#include "turned_product.h"

namespace {

constexpr int64_t kChunkRows = 512;  // tokens from which on no other text joins a chunk
constexpr int64_t kLaneQueries = 64;  // of a text that attend at once: lanes are queries
constexpr int64_t kFinishedRows = 96;  // of x that meet some rows of W before their sums are taken
constexpr int kPiecePanels = kPiece / kLanes;

// Of a product [outputs, inputs] and [outputs], or of a norm.
struct Affine {
    const void *weight, *bias;
};

struct EncoderLayer {
    Affine q, k, v, output, attention_norm, up, down, norm;
};

// 16 divides the size of a head and all sizes.
struct Encoder {
    const EncoderLayer* layers;
    int64_t num_layers, hidden, intermediate, num_heads;
    float eps, scale;
};

// Rows of texts that follow each other: x [.., hidden] become y.
struct Texts {
    const void* x;
    void* y;
    const int64_t* lengths;
    int64_t count;
};

// x times the share of a normal distribution below x (GELU), to a ten-millionth of x: the distribution's tail is Abramowitz
// and Stegun's 7.1.26.
inline float gelu(float x) {
    const float size = std::fabs(x), t = 1.0f / (1.0f + 0.2316419f * size);
    const float tail = ((((0.5307027145f * t - 0.7265760135f) * t + 0.7107068705f) * t - 0.142248368f) * t + 0.127414796f) * t;
    return std::max(x, 0.0f) - size * tail * exponential(-0.5f * x * x);
}

// x becomes (x - mean) / deviation * weight + bias, and `to` the same.
template <class Element>
void normalize(float* x, const Affine& norm, int64_t size, float eps, Element* to) {
    constexpr int element = sizeof(Element) == 2 ? BFLOAT16 : FLOAT32;
    float total = 0, squares = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < size; ++i) total += x[i];
    const float mean = total / static_cast<float>(size);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < size; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
    for (int64_t i = 0; i < size; ++i) {
        x[i] = (x[i] - mean) * factor * load_element(norm.weight, element, i) + load_element(norm.bias, element, i);
        put(to[i], x[i]);
    }
}

// Some queries of a text: rows `first_row` to first_row + length, the text's, are its keys.
struct QueryTile {
    int64_t first_row, length, first, count;
};

// A chunk of texts, their rows in order.
struct Chunk {
    int64_t first_row, rows;
    std::vector<QueryTile> tiles;
};

inline std::vector<Chunk> chunks_of(const Texts& texts) {
    std::vector<Chunk> chunks;
    int64_t row = 0;
    for (const int64_t* length = texts.lengths; length < texts.lengths + texts.count; row += *length++) {
        if (*length == 0) continue;
        if (chunks.empty() || chunks.back().rows >= kChunkRows) chunks.push_back({row, 0, {}});
        Chunk& chunk = chunks.back();
        for (int64_t first = 0; first < *length; first += kLaneQueries)
            chunk.tiles.push_back({chunk.rows, *length, first, std::min(kLaneQueries, *length - first)});
        chunk.rows += *length;
    }
    return chunks;
}

// The rows of a chunk: what the threads share. HAZARD: without the gap, rows of 1,024 floats meet in one set of the cache.
template <class Element>
struct EncoderRows {
    static constexpr int64_t kGap = 64 / sizeof(Element);
    float *x, *q, *k, *v;  // [rows, hidden]
    Element *of_hidden, *of_intermediate;  // [rows, size + kGap]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, const Encoder& e, int64_t rows) {
        size_t used = 0;
        const auto take = [&](auto*& place, int64_t size) {
            if (memory) place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(memory + used);
            used += (rows * size * sizeof *place + 63) / 64 * 64;
        };
        take(x, e.hidden), take(q, e.hidden), take(k, e.hidden), take(v, e.hidden);
        take(of_hidden, e.hidden + kGap), take(of_intermediate, e.intermediate + kGap);
        return used;
    }
};

// A thread's own memory: of products, or of attention.
struct EncoderOwn {
    float *turned, *columns;         // [words of a row of W, kPiece] and [kFinishedRows, kPiece]
    float *queries, *scores, *sums;  // [size, kLaneQueries], [kKeys, kLaneQueries] and [kLaneQueries, size]

    // Returns the bytes, and places everything when there is `memory`.
    size_t place(char* memory, const Encoder& e) {
        const int64_t words = std::max(e.hidden, e.intermediate), size = e.hidden / e.num_heads;
        turned = queries = reinterpret_cast<float*>(memory);
        columns = turned + words * kPiece;
        scores = queries + size * kLaneQueries;
        sums = scores + kKeys * kLaneQueries;
        return 4 * std::max((words + kFinishedRows) * kPiece, (2 * size + kKeys) * kLaneQueries);
    }
};

// Scores [keys, kLaneQueries] of `lanes` queries become shares beside the greatest so far, and `factors` those by which
// what is behind the earlier ones shrinks.
inline void soften_lanes(float* scores, int64_t keys, int64_t lanes, float* most, float* total, float* factors) {
    for (int64_t v = 0; v < lanes; v += kLanes) {
        Floats top = load(most + v);
        for (int64_t key = 0; key < keys; ++key) top = Greatest()(top, load(scores + key * kLaneQueries + v));
        for (int64_t i = 0; i < kLanes; ++i) factors[v + i] = exponential(most[v + i] - top[i]);
        store(most + v, top);
        Floats sum = load(total + v) * load(factors + v);
        for (int64_t key = 0; key < keys; ++key) {
            float* const at = scores + key * kLaneQueries + v;
            for (int64_t i = 0; i < kLanes; ++i) at[i] = exponential(at[i] - top[i]);
            sum = sum + load(at);
        }
        store(total + v, sum);
    }
}

// A chunk of an encoder's on its way through the layers.
template <class Element>
class EncoderRun {
   public:
    EncoderRun(Team& team, const Encoder& encoder, const Chunk& chunk, const EncoderRows<Element>& rows, const EncoderOwn& own)
        : team_(team), e_(encoder), chunk_(chunk), rows_(rows), own_(own) {}

    void read(const Element* x) {
        team_.share(chunk_.rows, [&](int64_t row, int64_t) {
            const Element* from = x + row * e_.hidden;
            std::memcpy(hidden(row), from, e_.hidden * sizeof *from);
            for (int64_t i = 0; i < e_.hidden; ++i) rows_.x[row * e_.hidden + i] = load_element(from, kElement, i);
        });
    }

    void run(const EncoderLayer& layer, const EncoderLayer& after) {
        const Matrix q = square(layer.q), k = square(layer.k), v = square(layer.v), output = square(layer.output);
        const Matrix up = matrix(layer.up, e_.intermediate, e_.hidden), down = matrix(layer.down, e_.hidden, e_.intermediate);
        const auto becomes = [](const float* sums, int64_t count, float* to) { copy_piece(sums, count, to); };
        const auto adds = [](const float* sums, int64_t count, float* to) {
            for (int64_t i = 0; i < count; ++i) to[i] += sums[i];
        };
        const auto activates = [](const float* sums, int64_t count, Element* to) {
            Element values[kPiece];
            for (int64_t i = 0; i < kPiece; ++i) put(values[i], gelu(sums[i]));
            copy_piece(values, count, to);
        };
        multiply(q, layer.q, k, rows_.of_hidden, rows_.q, e_.hidden, becomes);
        multiply(k, layer.k, v, rows_.of_hidden, rows_.k, e_.hidden, becomes);
        multiply(v, layer.v, output, rows_.of_hidden, rows_.v, e_.hidden, becomes);
        attend_all();
        multiply(output, layer.output, up, rows_.of_hidden, rows_.x, e_.hidden, adds);
        normalize_all(layer.attention_norm);
        multiply(up, layer.up, down, rows_.of_hidden, rows_.of_intermediate, e_.intermediate + kGap, activates);
        multiply(down, layer.down, square(after.q), rows_.of_intermediate, rows_.x, e_.hidden, adds);
        normalize_all(layer.norm);
    }

    void write(Element* y) {
        team_.share(chunk_.rows, [&](int64_t row, int64_t) {
            std::memcpy(y + row * e_.hidden, hidden(row), e_.hidden * sizeof *y);
        });
    }

   private:
    static constexpr int kElement = sizeof(Element) == 2 ? BFLOAT16 : FLOAT32;
    static constexpr int64_t kGap = EncoderRows<Element>::kGap;

    template <class Value>
    static void copy_piece(const Value* values, int64_t count, Value* to) {  // a known size is copied without a call
        count == kPiece ? std::memcpy(to, values, kPiece * sizeof *to) : std::memcpy(to, values, count * sizeof *to);
    }

    static Matrix matrix(const Affine& product, int64_t outputs, int64_t inputs) {
        const int64_t row_bytes = inputs * sizeof(Element);
        return {F32, static_cast<const uint8_t*>(product.weight), nullptr, 0, outputs, row_bytes / 4, row_bytes};
    }
    Matrix square(const Affine& product) const { return matrix(product, e_.hidden, e_.hidden); }
    Element* hidden(int64_t row) const { return rows_.of_hidden + row * (e_.hidden + kGap); }

    // `finish` makes the sums of a row what goes to `to`. `after` is the next product: it would begin with memory that nobody
    // fetched.
    template <class To, class Finish>
    void multiply(const Matrix& w, const Affine& product, const Matrix& after, const Element* x, To* to, int64_t stride,
                  const Finish& finish) {
        const int64_t pieces = (w.rows + kPiece - 1) / kPiece, x_stride = w.row_bytes / sizeof(Element) + kGap;
        float* const sums = own_.columns;
        team_.share(pieces, [&](int64_t piece, int64_t next) {
            const int64_t first = piece * kPiece, last = std::min(w.rows, first + kPiece);
            const NextRows ahead{next < pieces ? &w : &after, (next < pieces ? next : next - pieces) * kPiece};
            if constexpr (kElement == BFLOAT16) turn_rows(w, first, kPiecePanels, own_.turned, &ahead);
            float offsets[kPiece] = {};
            for (int64_t i = first; i < last; ++i) offsets[i - first] = load_element(product.bias, kElement, i);
            for (int64_t begin = 0; begin < chunk_.rows; begin += kFinishedRows) {
                const int64_t count = std::min(kFinishedRows, chunk_.rows - begin);
                const Element* const from = x + begin * x_stride;
                if constexpr (kElement == BFLOAT16)
                    multiply_turned<kPiecePanels>(from, x_stride, w.columns, own_.turned, nullptr, count, sums, kPiece, kPiece);
                else
                    multiply_dense_rows<float>(w, first, last, from, x_stride, count, sums, kPiece);
                for (int64_t row = 0; row < count; ++row) {
                    for (int64_t i = 0; i < kPiece; ++i) sums[row * kPiece + i] += offsets[i];
                    finish(sums + row * kPiece, last - first, to + (begin + row) * stride + first);
                }
            }
        });
    }

    void normalize_all(const Affine& norm) {
        team_.share(chunk_.rows, [&](int64_t row, int64_t) {
            normalize(rows_.x + row * e_.hidden, norm, e_.hidden, e_.eps, hidden(row));
        });
    }

    // What all tokens find becomes what products take.
    void attend_all() {
        team_.share(static_cast<int64_t>(chunk_.tiles.size()) * e_.num_heads, [&](int64_t piece, int64_t) {
            attend_to_text(chunk_.tiles[piece / e_.num_heads], piece % e_.num_heads);
        });
    }

    // Of keys of a text kKeys meet all queries of a tile at a time, with a running maximum and sum.
    void attend_to_text(const QueryTile& tile, int64_t head) {
        const int64_t size = e_.hidden / e_.num_heads, first_row = tile.first_row + tile.first;
        const int64_t lanes = (tile.count + kLanes - 1) / kLanes * kLanes;
        const auto at = [&](float* x, int64_t row) { return x + row * e_.hidden + head * size; };
        float most[kLaneQueries], total[kLaneQueries] = {}, factors[kLaneQueries];
        std::fill(most, most + lanes, -std::numeric_limits<float>::infinity());
        for (int64_t lane = 0; lane < lanes; lane += kLanes) {
            const PanelRows rows(at(rows_.q, first_row), 4 * e_.hidden, lane, tile.count);
            for (int64_t i = 0; i < size;) i += turn_columns(rows, i, size, own_.queries + i * kLaneQueries + lane, kLaneQueries);
        }
        for (int64_t i = 0; i < size; ++i)
            for (int64_t j = 0; j < lanes; ++j) own_.queries[i * kLaneQueries + j] *= e_.scale;
        std::memset(own_.sums, 0, 4 * tile.count * size);
        for (int64_t begin = 0; begin < tile.length; begin += kKeys) {
            const int64_t keys = std::min(kKeys, tile.length - begin), row = tile.first_row + begin;
            std::memset(own_.scores, 0, 4 * keys * kLaneQueries);
            const Strided scores{own_.scores, kLaneQueries}, sums{own_.sums, size};
            add_matrix(at(rows_.k, row), e_.hidden, keys, {own_.queries, kLaneQueries}, lanes, size, scores);
            soften_lanes(own_.scores, keys, lanes, most, total, factors);
            for (int64_t i = 0; begin && i < tile.count; ++i)
                for (int64_t j = 0; j < size; ++j) own_.sums[i * size + j] *= factors[i];
            add_matrix(own_.scores, 1, tile.count, {at(rows_.v, row), e_.hidden}, size, keys, sums, kLaneQueries);
        }
        for (int64_t i = 0; i < tile.count; ++i) {
            const float share = 1.0f / total[i];
            Element* const to = hidden(first_row + i) + head * size;
            for (int64_t j = 0; j < size; ++j) put(to[j], own_.sums[i * size + j] * share);
        }
    }

    Team& team_;
    const Encoder& e_;
    const Chunk& chunk_;
    const EncoderRows<Element>& rows_;
    const EncoderOwn& own_;
};

template <class Element>
int run_encoder(const Encoder& encoder, const Texts& texts, int threads) {
    const std::vector<Chunk> chunks = chunks_of(texts);
    int64_t most = 0;
    for (const Chunk& chunk : chunks) most = std::max(most, chunk.rows);
    EncoderRows<Element> rows;
    char* memory = activation_scratch.reserve(rows.place(nullptr, encoder, most));
    if (!memory) return 1;
    rows.place(memory, encoder, most);
    std::atomic<bool> failed{false};
    Team* team = nullptr;
    alignas(64) char place[sizeof(Team)];
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp single
        team = new (place) Team(omp_get_num_threads());
        EncoderOwn own;
        char* mine = tile_scratch.reserve(own.place(nullptr, encoder));
        if (mine)
            own.place(mine, encoder);
        else
            failed = true;
        team->share(0, [](int64_t, int64_t) {});
        for (auto chunk = chunks.begin(); !failed && chunk < chunks.end(); ++chunk) {
            EncoderRun<Element> run(*team, encoder, *chunk, rows, own);
            const int64_t offset = chunk->first_row * encoder.hidden;
            run.read(static_cast<const Element*>(texts.x) + offset);
            for (int64_t i = 0; i < encoder.num_layers; ++i)
                run.run(encoder.layers[i], encoder.layers[(i + 1) % encoder.num_layers]);
            run.write(static_cast<Element*>(texts.y) + offset);
        }
    }
    return failed;
}

}  // namespace
