// The tokens that a filter of the sampler keeps: all that have at least some key, which is sought without sorting.
//
// A sample tells about where the key lies; one pass over the tokens sums what is surely kept and takes out the few around
// it, which alone are looked at closely. Where the sample misled, and for few tokens, a histogram of all finds the key.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "exponential.h"

namespace {

constexpr int64_t kBins = 1024, kFew = 256;
constexpr int64_t kSpan = 128;  // tokens that are summed in float32 at a time
constexpr int64_t kMany = 8192;  // tokens of which a sample is worth its time
constexpr int64_t kRun = 16, kStride = 32;  // one run of tokens of so many is in the sample
constexpr double kDeviations = 3;  // by which the sample may be wrong
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
// `least`. Where they are counted only, all other weights are 1.
struct Candidates {
    const float* logits;
    int64_t n;
    float best, factor;
    float least = -kInfinity;
    bool is_counted = false;

    // Puts the logarithms of span number `span`'s weights into `logs`, its weights into `weights`, and returns its size.
    int64_t fill(int64_t span, float* logs, float* weights) const {
        const int64_t count = std::min(kSpan, n - span * kSpan);
        fill_run(span * kSpan, count, logs, weights);
        return count;
    }
    // The same for any `count` tokens that follow each other.
    void fill_run(int64_t begin, int64_t count, float* logs, float* weights) const {
        for (int64_t i = 0; i < count; ++i) {
            logs[i] = (logits[begin + i] - best) * factor;
            const float weight = exponential(logs[i]);  // of all: what is computed for some only is no loop over vectors
            weights[i] = logs[i] >= least ? weight : 0.0f;
        }
        for (int64_t i = 0; is_counted && i < count; ++i) weights[i] = logs[i] >= least ? 1.0f : 0.0f;
    }
    int64_t num_spans() const { return (n + kSpan - 1) / kSpan; }
};

inline float sum_of(const float* x, int64_t count) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; ++i) sum += x[i];
    return sum;
}

// The surprise of a token: how far the logarithm of its weight is from `middle`, or with 0 from the best one's.
inline float surprise(float log, float middle) { return std::fabs(log - middle); }

// The greatest surprise that is kept when tokens are taken from the least on, each while those before it weigh less than
// `share` of all. Beyond `reach` surprises are not told apart at first, nor at all where nothing of there can be kept.
float greatest_kept(const Candidates& all, float middle, double share, float reach, float* scratch) {
    double mass[kBins] = {}, total = 0, before = 0;
    float logs[kSpan], weights[kSpan];
    int32_t bins[kSpan];
    const float scale = (kBins - 1.0f) / reach;
    const auto find_bins = [&](int64_t count) {
        for (int64_t i = 0; i < count; ++i)
            bins[i] = static_cast<int32_t>(std::min(surprise(logs[i], middle) * scale, kBins - 1.0f));
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
                keys[found++] = -surprise(logs[i], middle);
            }
    }
    return found ? -least_kept(keys, own, found, share * total - before, scratch + 2 * all.n) : kInfinity;
}

// What surprises by at most `low` is kept, what surprises by more than `high` is not; between them it is to be seen.
struct Bracket {
    float low, high;
};

// Guess where the weights, from the least surprise on, sum to `share` of all: from one run of tokens of kStride, each of
// which stands for as many, and from the greatest of every block, which may weigh more than all others. `scratch` has
// room for n / 4 floats. The ratio of two sums over the same sample is better known than either.
Bracket guess_bracket(const Candidates& all, const float* maxima, int64_t block, float middle, double share,
                      float* scratch) {
    const int64_t num_blocks = (all.n + block - 1) / block;
    float *surprises = scratch, *sampled = scratch + all.n / 8;
    int64_t found = 0;
    for (int64_t begin = 0; begin + kRun <= all.n; begin += kRun * kStride) {
        float logs[kRun];
        all.fill_run(begin, kRun, logs, sampled + found);
        const float most = maxima[begin / block];  // runs divide a block
        for (int64_t i = 0; i < kRun; ++i) {
            sampled[found + i] = all.logits[begin + i] < most ? sampled[found + i] : 0.0f;
            surprises[found + i] = surprise(logs[i], middle);
        }
        found += kRun;
    }
    const int64_t num_sampled = found;
    const Candidates greatest{maxima, num_blocks, all.best, all.factor, all.least, all.is_counted};
    for (int64_t span = 0; span < greatest.num_spans(); ++span) {
        float logs[kSpan];
        const int64_t count = greatest.fill(span, logs, sampled + found);
        for (int64_t i = 0; i < count; ++i) surprises[found + i] = surprise(logs[i], middle);
        found += count;
    }
    float first = kInfinity, last = -kInfinity;
    for (int64_t i = 0; i < found; ++i) {
        first = std::min(first, sampled[i] > 0 ? surprises[i] : kInfinity);
        last = std::max(last, sampled[i] > 0 ? surprises[i] : -kInfinity);
    }
    const float scale = (kBins - 1.0f) / (last - first);
    if (!(scale > 0 && scale < 1e30f)) return {-kInfinity, kInfinity};
    double mass[kBins] = {}, squares[kBins] = {}, total = 0, all_squares = 0;
    for (int64_t i = 0; i < found; ++i) {
        if (!(sampled[i] > 0)) continue;
        const auto bin = static_cast<int32_t>(std::min((surprises[i] - first) * scale, kBins - 1.0f));
        const double weight = sampled[i];
        mass[bin] += i < num_sampled ? kStride * weight : weight;
        squares[bin] += i < num_sampled ? kStride * weight * kStride * weight : 0;
    }
    for (int64_t bin = 0; bin < kBins; ++bin) total += mass[bin], all_squares += squares[bin];
    // The sums before the borders of bins, from the one where the share seems to lie to where it surely does not.
    int64_t nearest = 0;
    for (int64_t bin = 0; bin < kBins; ++bin) {
        mass[bin] += bin ? mass[bin - 1] : 0;
        squares[bin] += bin ? squares[bin - 1] : 0;
        nearest += mass[bin] < share * total;
    }
    const auto error_of = [&](int64_t bin) {
        const double part = mass[bin] / total, others = std::max(0.0, all_squares - squares[bin]);
        const double deviation = std::sqrt((1 - part) * (1 - part) * squares[bin] + part * part * others);
        return kDeviations * deviation / total;
    };
    int64_t low = std::min(nearest, kBins - 1), high = low;
    while (low >= 0 && mass[low] / total + error_of(low) >= share) --low;
    while (high < kBins - 1 && mass[high] / total - error_of(high) < share) ++high;
    return {low < 0 ? -kInfinity : first + (low + 1) / scale, high == kBins - 1 ? kInfinity : first + (high + 1) / scale};
}

#ifndef __AVX512F__
// Of each set of eight bits, the places of the ones, from the lowest on.
struct PlacesOfBits {
    int32_t of[256][8] = {};
    constexpr PlacesOfBits() {
        for (int bits = 0; bits < 256; ++bits)
            for (int place = 0, found = 0; place < 8; ++place)
                if (bits >> place & 1) of[bits][found++] = place;
    }
};
constexpr PlacesOfBits kPlacesOfBits;
#endif

// Put those of a span's tokens that lie within the bracket, and weigh something, behind each other: their surprises with
// the other sign, weights and places. Returns how many there are; up to 16 more may be written over.
inline int64_t take_near(const float* surprises, const float* weights, int64_t first, const Bracket& bracket, float* keys,
                         float* own, int32_t* places) {
    int64_t found = 0;
#ifdef __AVX512F__
    const __m512 low = _mm512_set1_ps(bracket.low), high = _mm512_set1_ps(bracket.high), zero = _mm512_setzero_ps();
    const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = 0; i < kSpan; i += 16) {
        const __m512 given = _mm512_loadu_ps(surprises + i), weight = _mm512_loadu_ps(weights + i);
        const __m512i place = _mm512_add_epi32(counted, _mm512_set1_epi32(static_cast<int32_t>(first + i)));
        __mmask16 near = _mm512_cmp_ps_mask(given, low, _CMP_GT_OQ) & _mm512_cmp_ps_mask(given, high, _CMP_LE_OQ);
        near &= _mm512_cmp_ps_mask(weight, zero, _CMP_GT_OQ);
        // Compressed in a register: some processors take a hundred cycles to do so into memory.
        _mm512_storeu_ps(keys + found, _mm512_maskz_compress_ps(near, _mm512_sub_ps(zero, given)));
        _mm512_storeu_ps(own + found, _mm512_maskz_compress_ps(near, weight));
        _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi32(near, place));
        found += __builtin_popcount(near);
    }
#else
    const __m256 low = _mm256_set1_ps(bracket.low), high = _mm256_set1_ps(bracket.high), zero = _mm256_setzero_ps();
    const __m256i counted = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (int64_t i = 0; i < kSpan; i += 8) {
        const __m256 given = _mm256_loadu_ps(surprises + i), weight = _mm256_loadu_ps(weights + i);
        const __m256 is_low = _mm256_cmp_ps(given, low, _CMP_LE_OQ), is_near = _mm256_cmp_ps(given, high, _CMP_LE_OQ);
        const __m256 is_heavy = _mm256_cmp_ps(weight, zero, _CMP_GT_OQ);
        const int near = _mm256_movemask_ps(_mm256_and_ps(_mm256_andnot_ps(is_low, is_near), is_heavy));
        const __m256i first_ones = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kPlacesOfBits.of[near]));
        const __m256i place = _mm256_add_epi32(counted, _mm256_set1_epi32(static_cast<int32_t>(first + i)));
        _mm256_storeu_ps(keys + found, _mm256_permutevar8x32_ps(_mm256_sub_ps(zero, given), first_ones));
        _mm256_storeu_ps(own + found, _mm256_permutevar8x32_ps(weight, first_ones));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(places + found), _mm256_permutevar8x32_epi32(place, first_ones));
        found += __builtin_popcount(near);
    }
#endif
    return found;
}

// What is kept: what surprises by at most `limit`, and weighs `total`.
struct Kept {
    float limit;
    double total;
};

// Find what is kept when tokens are taken from the least surprise on, each while those before it weigh less than `share`
// of all, and its sums by spans. Returns false where the guess was wrong.
// `scratch` has room for 4 (n + 16) floats, `places` for n + 16 numbers.
bool keep_guessed(const Candidates& all, const float* maxima, int64_t block, float middle, double share,
                  float* scratch, int32_t* places, double* sums, Kept& kept) {
    if (all.n < kMany) return false;
    const Bracket bracket = guess_bracket(all, maxima, block, middle, share, scratch);
    float *keys = scratch, *own = scratch + all.n + 16;
    int64_t found = 0;
    double total = 0, sure = 0, near = 0;
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        const int64_t first = span * kSpan, count = std::min(kSpan, all.n - first);
        // Loop by loop: as one, the compiler does not turn them into vectors.
        float logs[kSpan], surprises[kSpan], weights[kSpan], sure_weights[kSpan];
        all.fill(span, logs, weights);
        for (int64_t i = 0; i < count; ++i) surprises[i] = surprise(logs[i], middle);
        for (int64_t i = 0; i < count; ++i) sure_weights[i] = surprises[i] <= bracket.low ? weights[i] : 0.0f;
        total += sum_of(weights, count);
        sure += sums[span] = sum_of(sure_weights, count);
        for (int64_t i = count; i < kSpan; ++i) surprises[i] = weights[i] = 0;
        found += take_near(surprises, weights, first, bracket, keys + found, own + found, places + found);
    }
    const double target = share * total;
    for (int64_t i = 0; i < found; i += kSpan) near += sum_of(own + i, std::min(kSpan, found - i));
    const bool has_all = sure + near >= target || bracket.high == kInfinity;
    if (!found || !(sure < target) || !has_all) return false;
    const float least = least_kept(keys, own, found, target - sure, scratch + 2 * (all.n + 16));
    kept = {-least, sure};
    for (int64_t i = 0; i < found; ++i)
        if (keys[i] >= least) {
            sums[places[i] / kSpan] += own[i];
            kept.total += own[i];
        }
    return true;
}

}  // namespace
