// Work that the threads of a parallel region share.

#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>

namespace {

// Do pieces 0 to count - 1, those that no other thread takes. `work` is told its piece and the one that this thread does
// next (count or more: none), whose memory can be fetched meanwhile.
template <class Work>
void take_pieces(std::atomic<int64_t>& taken, int64_t count, const Work& work) {
    const auto take = [&] { return taken.fetch_add(1, std::memory_order_relaxed); };
    for (int64_t next, piece = take(); piece < count; piece = next) {
        next = take();
        work(piece, next);
    }
}

// Pieces of work for the threads of a region. HAZARD: libgomp's barriers spin for milliseconds, which on a busy machine
// takes the processor from the thread that is waited for; this one yields it.
class Team {
   public:
    explicit Team(int size) : size_(size) {}

    // Do pieces 0 to count - 1 between all threads; they are done when it returns.
    template <class Work>
    void share(int64_t count, const Work& work) {
        take_pieces(next_, count, work);
        const unsigned round = round_.load(std::memory_order_relaxed);
        if (waiting_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
            waiting_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; ++spins)
            spins < 2000 ? _mm_pause() : static_cast<void>(sched_yield());
    }

   private:
    const int size_;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<unsigned> round_{0};
};

}  // namespace
