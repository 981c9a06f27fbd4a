// Draws of the sampler: which tokens the filters of a row keep, and on which of them a number in [0, 1) falls.
//
// Every filter keeps what has at least some key: top-k, top-p and min-p the greatest logits, typical the surprises that
// are nearest to the entropy; and all that is as good as the last one kept (kept_tokens.h). The logits of a row are read
// from the processor's cache once for each filter, and their weights are computed anew each time, which costs less than
// memory for them. sampler.py has the same in torch.

#pragma once

#include "kept_tokens.h"

namespace {

struct DrawnRow {
    int64_t row, top_k;  // 0: all tokens
    double best, draw, temperature, top_p, min_p, typical_p;
};

// Sums of the weights of what surprises by at most `limit`, by spans and in all.
double sum_kept(const Candidates& all, float middle, float limit, double* sums) {
    double total = 0;
    float logs[kSpan], weights[kSpan];
    for (int64_t span = 0; span < all.num_spans(); ++span) {
        const int64_t count = all.fill(span, logs, weights);
        for (int64_t i = 0; i < count; ++i) weights[i] = surprise(logs[i], middle) <= limit ? weights[i] : 0.0f;
        total += *sums++ = sum_of(weights, count);
    }
    return total;
}

// The first place where the sum of what is kept passes `draw` of all, in the order of token ids: then a rounding error
// moves the borders between tokens by as little, and never exchanges two of them.
int64_t place_of(double draw, const Candidates& all, float middle, float limit, const double* sums,
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
    for (int64_t i = 0; i < count; ++i) weights[i] = surprise(logs[i], middle) <= limit ? weights[i] : 0.0f;
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

    static size_t nbytes(int64_t size) { return 6 * 4 * (size + 16) + 8 * (size / kSpan + 1); }
    DrawScratch(char* memory, int64_t size) {
        sums = reinterpret_cast<double*>(memory);
        logits = reinterpret_cast<float*>(memory + 8 * (size / kSpan + 1));
        ids = reinterpret_cast<int32_t*>(logits + size + 16);
        narrowing = logits + 2 * (size + 16);
    }
};

// Puts the tokens whose logits are at least `least` into `to`, and returns how many there are.
int64_t gather(const float* x, int64_t size, const float* maxima, int64_t block, float least, DrawScratch& to) {
    int64_t found = 0;
    for (int64_t begin = 0; begin < size; begin += kSpan) {
        float surprises[kSpan], weights[kSpan];
        const int64_t count = std::min(kSpan, size - begin);
        if (*std::max_element(maxima + begin / block, maxima + (begin + count - 1) / block + 1) < least) continue;
        for (int64_t i = 0; i < count; ++i) surprises[i] = -x[begin + i], weights[i] = 1;
        for (int64_t i = count; i < kSpan; ++i) surprises[i] = kInfinity, weights[i] = 0;
        const Bracket kept{-kInfinity, -least};
        found += take_near(surprises, weights, begin, kept, to.logits + found, to.narrowing, to.ids + found);
    }
    return found;
}

// Puts the tokens of the `top_k` greatest logits, and those that are as good as the last of them, into `to`.
int64_t gather_best(const float* x, int64_t size, const float* maxima, int64_t block, int64_t top_k, float best,
                    DrawScratch& to) {
    const int64_t num_blocks = (size + block - 1) / block;
    float least = -FLT_MAX;  // a bound of the last one
    if (top_k <= num_blocks) {  // so many blocks have a maximum of at least this
        std::copy(maxima, maxima + num_blocks, to.narrowing);
        std::nth_element(to.narrowing, to.narrowing + top_k - 1, to.narrowing + num_blocks, std::greater<>());
        least = to.narrowing[top_k - 1];
    } else if (size >= kMany) {
        const Candidates counted{x, size, best, 1, -FLT_MAX, true};
        const double share = static_cast<double>(top_k) / static_cast<double>(size);
        least = std::max(least, best - guess_bracket(counted, maxima, block, 0, share, to.narrowing).high);
    }
    int64_t found = gather(x, size, maxima, block, least, to);
    if (found < top_k) found = gather(x, size, maxima, block, -FLT_MAX, to);  // the guess was wrong
    if (found <= top_k) return found;
    std::copy(to.logits, to.logits + found, to.narrowing);
    std::nth_element(to.narrowing, to.narrowing + top_k - 1, to.narrowing + found, std::greater<>());
    least = to.narrowing[top_k - 1];
    int64_t kept = 0;
    for (int64_t i = 0; i < found; ++i)
        if (to.logits[i] >= least) {
            to.logits[kept] = to.logits[i];
            to.ids[kept++] = to.ids[i];
        }
    return kept;
}

// Returns the token that the row draws. Its logits x [size] have a finite maximum, `maxima` are those of its blocks.
int64_t draw_token(const float* x, int64_t size, const float* maxima, int64_t block, const DrawnRow& row, char* memory) {
    DrawScratch scratch(memory, size);
    const float factor = static_cast<float>(1 / std::max(row.temperature, 1e-30));
    Candidates all{x, size, static_cast<float>(row.best), factor};
    const bool has_top_k = row.top_k > 0 && row.top_k < size;
    if (has_top_k) {
        all.n = gather_best(x, size, maxima, block, row.top_k, all.best, scratch);
        all.logits = scratch.logits;
    }
    const float plain = 0;
    Kept kept{};
    bool is_summed = false;  // those that are kept, by spans
    if (row.top_p < 1) {
        // All tokens of less than (1 - p) / n of the best one's probability have less than 1 - p together.
        const double reach = std::log(static_cast<double>(all.n) / (1 - row.top_p)) + 1;
        is_summed = !has_top_k && keep_guessed(all, maxima, block, plain, row.top_p, scratch.narrowing, scratch.ids,
                                               scratch.sums, kept);
        all.least = -(is_summed ? kept.limit
                                : greatest_kept(all, plain, row.top_p, static_cast<float>(reach), scratch.narrowing));
    }
    if (row.min_p > 0 && std::log(row.min_p) > all.least) {
        all.least = static_cast<float>(std::log(row.min_p));
        is_summed = false;
    }
    if (row.typical_p >= 1) {
        const double total = is_summed ? kept.total : sum_kept(all, plain, kInfinity, scratch.sums);
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
    const auto distance = static_cast<float>(mean / total);
    is_summed = !has_top_k && keep_guessed(all, maxima, block, distance, row.typical_p, scratch.narrowing,
                                           scratch.ids, scratch.sums, kept);
    if (!is_summed) {
        kept.limit = greatest_kept(all, distance, row.typical_p, 32, scratch.narrowing);
        kept.total = sum_kept(all, distance, kept.limit, scratch.sums);
    }
    const int64_t place = place_of(row.draw, all, distance, kept.limit, scratch.sums, kept.total);
    return has_top_k ? scratch.ids[place] : place;
}

}  // namespace
