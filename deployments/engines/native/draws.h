// Draws of the sampler: which tokens the filters of a row keep, and on which of them a number in [0, 1) falls.
//
// Every filter keeps what has at least some key: top-k, top-p and min-p the greatest logits, typical the surprises that
// are nearest to the entropy; and all that is as good as the last one kept. So nothing is sorted but the few tokens
// around that key, which a histogram finds. The logits of a row are read from the processor's cache some four times, and
// their weights are computed anew each time, which costs less than memory for them. sampler.py has the same in torch.

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
        const float scale = (kBins - 1.0f) / (high - low);
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
                const auto bin = static_cast<int32_t>(std::min((high - keys[begin + i]) * scale, kBins - 1.0f));
                bins[i] = keys[begin + i] >= -FLT_MAX ? bin : -1;
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

// The candidates of a row: n logits, whose weights have the logarithm (logit - best) factor, or are 0 where it is below
// `least`.
struct Candidates {
    const float* logits;
    int64_t n;
    float best, factor;
    float least = -kInfinity;

    // Puts the logarithms of span number `span`'s weights into `logs`, its weights into `weights`, and returns its size.
    int64_t fill(int64_t span, float* logs, float* weights) const {
        const float* from = logits + span * kSpan;
        const int64_t count = std::min(kSpan, n - span * kSpan);
        for (int64_t i = 0; i < count; ++i) {
            logs[i] = (from[i] - best) * factor;
            const float weight = exponential(logs[i]);  // of all: what may trap is not computed by halves of a vector
            weights[i] = logs[i] >= least ? weight : 0.0f;
        }
        return count;
    }
    int64_t num_spans() const { return (n + kSpan - 1) / kSpan; }
};

inline float sum_of(const float* x, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += x[i];
    return sum;
}

// The surprise of a token: how far the logarithm of its weight is from the best one's, or from `middle`.
struct Surprise {
    bool has_middle;
    float middle;
    float operator()(float log) const { return has_middle ? std::fabs(log - middle) : -log; }
};

// The greatest surprise that is kept when tokens are taken from the least on, each while those before it weigh less than
// `share` of all. Beyond `reach` surprises are not told apart at first, nor at all where nothing of there can be kept.
float greatest_kept(const Candidates& all, const Surprise& surprise, double share, float reach, float* scratch) {
    double mass[kBins] = {}, total = 0, before = 0;
    float logs[kSpan], weights[kSpan];
    int32_t bins[kSpan];
    const float scale = (kBins - 1.0f) / reach;
    const auto find_bins = [&](int64_t count) {
        for (int64_t i = 0; i < count; ++i)
            bins[i] = static_cast<int32_t>(std::min(surprise(logs[i]) * scale, kBins - 1.0f));
    };
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        const int64_t count = all.fill(span, logs, weights);
        find_bins(count);
        int32_t first = kBins;
        for (int64_t i = 0; i < count; ++i) first = std::min(first, bins[i]);
        if (first == kBins - 1) {
            mass[first] += sum_of(weights, count);
            continue;
        }
        for (int64_t i = 0; i < count; ++i) mass[bins[i]] += weights[i];
    }
    for (const double one : mass) total += one;
    int32_t bin = 0;
    while (bin + 1 < kBins && before + mass[bin] < share * total) before += mass[bin++];
    float *keys = scratch, *own = scratch + all.n;
    int64_t found = 0;
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        const int64_t count = all.fill(span, logs, weights);
        find_bins(count);
        int32_t is_any = 0;
        for (int64_t i = 0; i < count; ++i) is_any |= bins[i] == bin;
        for (int64_t i = 0; is_any && i < count; ++i)
            if (bins[i] == bin && weights[i] > 0) {
                own[found] = weights[i];
                keys[found++] = -surprise(logs[i]);
            }
    }
    return found ? -least_kept(keys, own, found, share * total - before, scratch + 2 * all.n) : kInfinity;
}

// Sums of the weights of what surprises by at most `limit`, by spans and in all.
double sum_kept(const Candidates& all, const Surprise& surprise, float limit, double* sums) {
    double total = 0;
    float logs[kSpan], weights[kSpan];
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        const int64_t count = all.fill(span, logs, weights);
        for (int64_t i = 0; i < count; ++i) weights[i] = surprise(logs[i]) <= limit ? weights[i] : 0.0f;
        total += *sums++ = sum_of(weights, count);
    }
    return total;
}

// The first place where the sum of what is kept passes `draw` of all, in the order of token ids: then a rounding error
// moves the borders between tokens by as little, and never exchanges two of them.
int64_t place_of(double draw, const Candidates& all, const Surprise& surprise, float limit, const double* sums,
                 double total) {
    const double point = draw * total;
    double before = 0, inner = 0, sum = 0;
    int64_t span = -1;
    for (int64_t i = 0; i < all.num_spans(); ++i) {
        if (sums[i] <= 0) continue;
        if (span >= 0) before += sums[span];
        span = i;
        if (before + sums[i] > point) break;
    }
    float logs[kSpan], weights[kSpan];
    const int64_t count = all.fill(span, logs, weights);
    for (int64_t i = 0; i < count; ++i) weights[i] = surprise(logs[i]) <= limit ? weights[i] : 0.0f;
    for (int64_t i = 0; i < count; ++i) inner += weights[i];
    const double share = (point - before) / sums[span] * inner;
    int64_t place = 0;
    for (int64_t i = 0; i < count; ++i) {
        if (weights[i] <= 0) continue;
        place = i;
        if ((sum += weights[i]) > share) break;
    }
    return span * kSpan + place;
}

// Room of one draw.
struct DrawScratch {
    float *logits, *narrowing;
    int32_t* ids;
    double* sums;

    static size_t nbytes(int64_t size) { return 6 * 4 * size + 8 * (size / kSpan + 1); }
    DrawScratch(char* memory, int64_t size) {
        sums = reinterpret_cast<double*>(memory);
        logits = reinterpret_cast<float*>(memory + 8 * (size / kSpan + 1));
        ids = reinterpret_cast<int32_t*>(logits + size);
        narrowing = logits + 2 * size;
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
                to.logits[found] = x[i];
                to.ids[found++] = static_cast<int32_t>(i);
            }
    if (top_k <= num_blocks) {
        std::copy(to.logits, to.logits + found, to.narrowing);
        std::nth_element(to.narrowing, to.narrowing + top_k - 1, to.narrowing + found, std::greater<>());
        least = to.narrowing[top_k - 1];
        int64_t kept = 0;
        for (int64_t i = 0; i < found; ++i)
            if (to.logits[i] >= least) {
                to.logits[kept] = to.logits[i];
                to.ids[kept++] = to.ids[i];
            }
        found = kept;
    }
    return found;
}

// Returns the token that the row draws. Its logits x [size] have a finite maximum, `maxima` are those of its blocks.
int64_t draw_token(const float* x, int64_t size, const float* maxima, int64_t block, const DrawnRow& row, char* memory) {
    DrawScratch scratch(memory, size);
    const float factor = static_cast<float>(1 / std::max(row.temperature, 1e-30));
    Candidates all{x, size, static_cast<float>(row.best), factor};
    const bool has_top_k = row.top_k > 0 && row.top_k < size;
    if (has_top_k) {
        all.n = gather_best(x, size, maxima, block, row.top_k, scratch);
        all.logits = scratch.logits;
    }
    const Surprise plain{false, 0};
    if (row.top_p < 1) {
        // All tokens of less than (1 - p) / n of the best one's probability have less than 1 - p together.
        const double reach = std::log(static_cast<double>(all.n) / (1 - row.top_p)) + 1;
        all.least = -greatest_kept(all, plain, row.top_p, static_cast<float>(reach), scratch.narrowing);
    }
    if (row.min_p > 0) all.least = std::max(all.least, static_cast<float>(std::log(row.min_p)));
    if (row.typical_p >= 1) {
        const double total = sum_kept(all, plain, kInfinity, scratch.sums);
        const int64_t place = place_of(row.draw, all, plain, kInfinity, scratch.sums, total);
        return has_top_k ? scratch.ids[place] : place;
    }
    // Surprise less entropy is the mean of the logarithms of all weights less a token's.
    double total = 0, mean = 0;
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        float logs[kSpan], weights[kSpan];
        const int64_t count = all.fill(span, logs, weights);
        total += sum_of(weights, count);
        for (int64_t i = 0; i < count; ++i) {
            const float product = weights[i] * logs[i];  // of 0 and -infinity, none
            logs[i] = weights[i] > 0 ? product : 0.0f;
        }
        mean += sum_of(logs, count);
    }
    const Surprise distance{true, static_cast<float>(mean / total)};
    const float limit = greatest_kept(all, distance, row.typical_p, 32, scratch.narrowing);
    total = sum_kept(all, distance, limit, scratch.sums);
    const int64_t place = place_of(row.draw, all, distance, limit, scratch.sums, total);
    return has_top_k ? scratch.ids[place] : place;
}

}  // namespace
