// Draws of the sampler: which tokens the filters of a row keep, and on which of them a number in [0, 1) falls.
//
// Every filter keeps what has at least some key: top-k, top-p and min-p the greatest logits, typical the surprises that
// are nearest to the entropy; and all that is as good as the last one kept. So nothing is sorted but the few tokens
// around that key, which a histogram finds. sampler.py has the same in torch.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "exponential.h"

namespace {

struct DrawnRow {
    int64_t row, top_k;  // 0: all tokens
    double best, draw, temperature, top_p, min_p, typical_p;
};

constexpr int64_t kBins = 1024, kFew = 256;
constexpr int64_t kSpan = 128;  // tokens that are summed in float32 at a time
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// The least key that is kept when keys are taken from the greatest on, each while the weights before it sum to less than
// `target`; without `weights`, each weighs 1. Keys of -infinity are never taken. `scratch` has room for 2 n floats.
float least_kept(const float* keys, const float* weights, int64_t n, double target, float* scratch) {
    float *own_keys = scratch, *own_weights = scratch + n;
    double before = 0;
    for (;;) {
        float low = kInfinity, high = -kInfinity;
#pragma omp simd reduction(min : low) reduction(max : high)
        for (int64_t i = 0; i < n; ++i) {
            high = std::max(high, keys[i]);
            low = std::min(low, keys[i] >= -FLT_MAX ? keys[i] : kInfinity);
        }
        if (!(low < high)) return high;
        const float scale = static_cast<float>(kBins - 1) / (high - low);
        if (n <= kFew || !(scale > 0 && scale < 1e30f)) {  // a difference that overflows, or is all but nothing
            std::vector<std::pair<float, float>> pairs;
            for (int64_t i = 0; i < n; ++i)
                if (keys[i] >= -FLT_MAX) pairs.emplace_back(keys[i], weights ? weights[i] : 1.0f);
            std::sort(pairs.begin(), pairs.end(), std::greater<>());
            float least = high;
            for (const auto& [key, weight] : pairs) {
                if (before >= target) break;
                least = key;
                before += weight;
            }
            return least;
        }
        double mass[kBins] = {};
        int32_t bins[kSpan];
        const auto find_bins = [&](int64_t begin, int64_t count) {  // those of -infinity lie behind the last one
            for (int64_t i = 0; i < count; ++i) {
                const float at = std::min((high - keys[begin + i]) * scale, static_cast<float>(kBins - 1));
                bins[i] = keys[begin + i] >= -FLT_MAX ? static_cast<int32_t>(at) : -1;
            }
        };
        for (int64_t begin = 0; begin < n; begin += kSpan) {
            const int64_t count = std::min(kSpan, n - begin);
            find_bins(begin, count);
            for (int64_t i = 0; i < count; ++i)
                if (bins[i] >= 0) mass[bins[i]] += weights ? weights[begin + i] : 1.0f;
        }
        int32_t bin = 0;
        while (bin + 1 < kBins && before + mass[bin] < target) before += mass[bin++];
        int64_t found = 0;
        for (int64_t begin = 0; begin < n; begin += kSpan) {
            const int64_t count = std::min(kSpan, n - begin);
            find_bins(begin, count);
            int32_t is_any = 0;
            for (int64_t i = 0; i < count; ++i) is_any |= bins[i] == bin;
            for (int64_t i = 0; is_any && i < count; ++i)
                if (bins[i] == bin) {
                    own_weights[found] = weights ? weights[begin + i] : 1.0f;
                    own_keys[found++] = keys[begin + i];
                }
        }
        keys = own_keys;
        weights = own_weights;
        n = found;
    }
}

// Sets the weights of keys below `least` to 0 and returns the sums of the others, by spans and in all.
double keep_from(float least, const float* keys, float* weights, int64_t n, double* sums) {
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += kSpan) {
        const int64_t end = std::min(begin + kSpan, n);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; ++i) sum += weights[i] = keys[i] >= least ? weights[i] : 0.0f;
        total += *sums++ = sum;
    }
    return total;
}

// The first place where the sum of the weights passes `draw` of all, in the order of token ids: then a rounding error
// moves the borders between tokens by as little, and never exchanges two of them.
int64_t place_of(double draw, const float* weights, int64_t n, const double* sums, double total) {
    const int64_t num_spans = (n + kSpan - 1) / kSpan;
    const double point = draw * total;
    double before = 0;
    int64_t span = -1;
    for (int64_t i = 0; i < num_spans; ++i) {
        if (sums[i] <= 0) continue;
        if (span >= 0) before += sums[span];
        span = i;
        if (before + sums[i] > point) break;
    }
    const int64_t begin = span * kSpan, end = std::min(begin + kSpan, n);
    double inner = 0, sum = 0;
    for (int64_t i = begin; i < end; ++i) inner += weights[i];
    const double share = (point - before) / sums[span] * inner;
    int64_t place = begin;
    for (int64_t i = begin; i < end; ++i) {
        if (weights[i] <= 0) continue;
        place = i;
        if ((sum += weights[i]) > share) break;
    }
    return place;
}

// Room of one draw.
struct DrawScratch {
    float *weights, *keys, *narrowing;
    int32_t* ids;
    double* sums;

    static size_t nbytes(int64_t size) { return 5 * 4 * size + 8 * (size / kSpan + 1); }
    DrawScratch(char* memory, int64_t size) {
        sums = reinterpret_cast<double*>(memory);
        weights = reinterpret_cast<float*>(memory + 8 * (size / kSpan + 1));
        keys = weights + size;
        narrowing = keys + size;
        ids = reinterpret_cast<int32_t*>(narrowing + 2 * size);
    }
};

// Puts the tokens of the `top_k` greatest logits, and those that are as good as the last of them, into `to`.
int64_t gather_best(const float* x, int64_t size, const float* maxima, int64_t block, int64_t top_k, DrawScratch& to) {
    const int64_t num_blocks = (size + block - 1) / block;
    float least;
    if (top_k <= num_blocks) {  // so many blocks have a maximum of at least this
        std::copy(maxima, maxima + num_blocks, to.narrowing);
        std::nth_element(to.narrowing, to.narrowing + top_k - 1, to.narrowing + num_blocks, std::greater<>());
        least = to.narrowing[top_k - 1];
    } else {
        least = least_kept(x, nullptr, size, static_cast<double>(top_k), to.narrowing);
    }
    int64_t found = 0;
    for (int64_t at = 0; at < num_blocks; ++at)
        for (int64_t i = at * block; maxima[at] >= least && i < std::min(size, (at + 1) * block); ++i)
            if (x[i] >= least) {
                to.keys[found] = x[i];
                to.ids[found++] = static_cast<int32_t>(i);
            }
    if (top_k <= num_blocks) {
        std::copy(to.keys, to.keys + found, to.narrowing);
        std::nth_element(to.narrowing, to.narrowing + top_k - 1, to.narrowing + found, std::greater<>());
        least = to.narrowing[top_k - 1];
        int64_t kept = 0;
        for (int64_t i = 0; i < found; ++i)
            if (to.keys[i] >= least) {
                to.keys[kept] = to.keys[i];
                to.ids[kept++] = to.ids[i];
            }
        found = kept;
    }
    return found;
}

// Returns the token that the row draws. Its logits x [size] have a finite maximum, `maxima` are those of its blocks.
int64_t draw_token(const float* x, int64_t size, const float* maxima, int64_t block, const DrawnRow& row, char* memory) {
    DrawScratch scratch(memory, size);
    const float* keys = x;
    int64_t n = size;
    const bool has_top_k = row.top_k > 0 && row.top_k < size;
    if (has_top_k) {
        n = gather_best(x, size, maxima, block, row.top_k, scratch);
        keys = scratch.keys;
    }
    const float best = static_cast<float>(row.best);
    const float factor = static_cast<float>(1 / std::max(row.temperature, 1e-30));
    float* weights = scratch.weights;
    double total = 0;
    for (int64_t begin = 0, span = 0; begin < n; begin += kSpan, ++span) {
        const int64_t end = std::min(begin + kSpan, n);
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = begin; i < end; ++i) sum += weights[i] = exponential((keys[i] - best) * factor);
        total += scratch.sums[span] = sum;
    }
    if (row.top_p < 1 || row.min_p > 0) {
        float least = -FLT_MAX;
        if (row.top_p < 1) least = least_kept(keys, weights, n, row.top_p * total, scratch.narrowing);
        if (row.min_p > 0) least = std::max(least, static_cast<float>(best + row.temperature * std::log(row.min_p)));
        total = keep_from(least, keys, weights, n, scratch.sums);
    }
    if (row.typical_p < 1) {  // surprise - entropy = mean of y - y, where a token's probability is e^y over all
        double mean = 0;
        for (int64_t begin = 0; begin < n; begin += kSpan) {
            const int64_t end = std::min(begin + kSpan, n);
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = begin; i < end; ++i) sum += weights[i] > 0 ? weights[i] * ((keys[i] - best) * factor) : 0.0f;
            mean += sum / total;
        }
        const float middle = static_cast<float>(mean);
        for (int64_t i = 0; i < n; ++i)
            scratch.keys[i] = weights[i] > 0 ? -std::fabs((keys[i] - best) * factor - middle) : -kInfinity;
        const float least = least_kept(scratch.keys, weights, n, row.typical_p * total, scratch.narrowing);
        total = keep_from(least, scratch.keys, weights, n, scratch.sums);
    }
    const int64_t place = place_of(row.draw, weights, n, scratch.sums, total);
    return has_top_k ? scratch.ids[place] : place;
}

}  // namespace
