#include "pool.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

namespace wk {
namespace {

constexpr int kSpins = 8000;  // pauses, some 0.2 ms: longer than what lies between calls, shorter than an idle server

const Call* end_of_group(const Call* first, const Call* last) {
  const Call* end = first + 1;
  while (end != last && !end->waits) ++end;
  return end;
}

void run_pieces(const Call* first, const Call* last, std::int64_t begin, std::int64_t end) {
  for (const Call* call = first; call != last; ++call) call->kernel.run(call->args, begin, end);
}

// One group of calls is open at a time. Each thread has a part of its pieces, neighbouring ones, and helps the others
// when it has done them. A part says which group it is of, and how many of its pieces nobody has claimed; whoever does
// the last piece opens the next group. What else is known of a group is written while no part has pieces left, so what
// was read of it before a claim that succeeds is that group's.
class Pool {
 public:
  void run(const Call* first, const Call* last, int threads) {
    threads = std::min(threads, kParts);
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (!lock) return run_alone(first, last);  // another worker of this process has the threads
    for (int have = workers_.load(); have < threads - 1; ++have) {
      workers_.store(have + 1);
      std::thread([this, have] { serve(have); }).detach();
    }
    limit_.store(threads - 1, std::memory_order_relaxed);
    threads_ = threads;
    position_ = first;
    end_ = last;
    finished_.store(false, std::memory_order_relaxed);
    open_next();
    for (int spins = 0; !finished_.load(std::memory_order_acquire);) {
      if (claim(0)) {
        spins = 0;
      } else if (++spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();  // who has the last piece may be waiting for this very core
      }
    }
  }

  static void run_alone(const Call* first, const Call* last) {
    while (first != last) {
      const Call* const end = end_of_group(first, last);
      run_pieces(first, end, 0, first->kernel.pieces(first->args));
      first = end;
    }
  }

 private:
  static constexpr std::uint64_t kPieces = 0xFFFFFFFF;  // the lower half of unclaimed_; the upper half counts groups
  static constexpr int kParts = 256;

  static std::int64_t part_start(std::int64_t pieces, std::int64_t part, std::int64_t parts) {
    return pieces * part / parts;
  }

  // Do some pieces of the open group, first of the thread's own part; false if there are none left.
  bool claim(int number) {
    const int parts = parts_.load(std::memory_order_relaxed);
    for (int i = 0; i < parts; ++i) {
      const int part = (number + i) % parts;
      std::uint64_t open = unclaimed_[part].load(std::memory_order_acquire);
      const std::int64_t unclaimed = open & kPieces;
      if (unclaimed == 0) continue;
      const Call* const first = first_.load(std::memory_order_relaxed);
      const Call* const last = last_.load(std::memory_order_relaxed);
      const std::int64_t end =
          part_start(pieces_.load(std::memory_order_relaxed), part + 1, parts_.load(std::memory_order_relaxed));
      const std::int64_t begin = end - unclaimed;
      const std::int64_t count = std::min(share_.load(std::memory_order_relaxed), unclaimed);
      if (!unclaimed_[part].compare_exchange_strong(open, open - count, std::memory_order_acq_rel)) return true;
      run_pieces(first, last, begin, begin + count);
      if (left_.fetch_sub(count, std::memory_order_acq_rel) == count) open_next();
      return true;
    }
    return false;
  }

  void open_next() {
    while (position_ != end_) {
      const Call* const first = position_;
      position_ = end_of_group(first, end_);
      const std::int64_t pieces = first->kernel.pieces(first->args);
      if (pieces == 0) continue;
      first_.store(first, std::memory_order_relaxed);
      last_.store(position_, std::memory_order_relaxed);
      pieces_.store(pieces, std::memory_order_relaxed);
      parts_.store(threads_, std::memory_order_relaxed);
      share_.store(std::max<std::int64_t>(1, pieces / (threads_ * 16)), std::memory_order_relaxed);
      left_.store(pieces, std::memory_order_relaxed);
      ++group_;
      // Once the last part is there, others may go on to the next group: from then on only atomics are looked at.
      for (std::uint64_t part = 0, parts = threads_, group = group_ << 32; part < parts; ++part) {
        const std::int64_t size = part_start(pieces, part + 1, parts) - part_start(pieces, part, parts);
        unclaimed_[part].store(group | static_cast<std::uint64_t>(size), std::memory_order_release);
      }
      opened_.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) opened_.notify_all();
      return;
    }
    finished_.store(true, std::memory_order_release);
  }

  void serve(int number) {
    for (int spins = 0;;) {
      const std::uint64_t seen = opened_.load(std::memory_order_acquire);
      if (number < limit_.load(std::memory_order_relaxed) && claim(number + 1)) {
        spins = 0;
      } else if (++spins < kSpins) {
        _mm_pause();
      } else {
        sleepers_.fetch_add(1);
        opened_.wait(seen);
        sleepers_.fetch_sub(1);
        spins = 0;
      }
    }
  }

  std::mutex mutex_;
  std::atomic<int> workers_{0}, limit_{0}, sleepers_{0};
  int threads_ = 1;
  const Call* position_ = nullptr;
  const Call* end_ = nullptr;
  std::atomic<const Call*> first_{nullptr}, last_{nullptr};
  std::atomic<std::int64_t> pieces_{0}, share_{1};
  std::atomic<bool> finished_{true};
  struct alignas(64) Part : std::atomic<std::uint64_t> {};
  std::atomic<int> parts_{1};
  Part unclaimed_[kParts];
  std::uint64_t group_ = 0;
  alignas(64) std::atomic<std::uint64_t> opened_{0};  // how many groups, for those who wait for one
  alignas(64) std::atomic<std::int64_t> left_{0};
};

}  // namespace

void run(const Call* first, const Call* last, int threads) {
  static Pool* const pool = new Pool;  // its threads outlive everything
  if (threads > 1) {
    pool->run(first, last, threads);
  } else {
    Pool::run_alone(first, last);
  }
}

}  // namespace wk
