// What the drivers stand on: memory for all threads in one piece, and a loop over tasks.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <new>
#include <thread>

#include "request.h"
#include "threads.h"

namespace einsight {
inline namespace EINSIGHT_PRECISION {

struct Free { void operator()(Real *p) const { std::free(p); } };
using Memory = std::unique_ptr<Real, Free>;

inline Memory allocate(int64_t count) {
  auto p = static_cast<Real *>(std::aligned_alloc(64, round_up(count * sizeof(Real) + 64, 64)));
  if (!p) throw std::bad_alloc();
  return Memory(p);
}

// Hands out pieces of one allocation. Run once with null to learn the size, once to hand out.
struct Arena {
  Real *base;
  int64_t used = 0;
  Real *take(int64_t count) {
    Real *piece = base ? base + used : nullptr;
    used += round_up(count, 16);
    return piece;
  }
};

// A loop over tasks, shared by threads; each thread takes the next one when it is free.
class Loop {
 public:
  Loop(int threads, int64_t tasks, bool (*interrupted)()) : threads_(threads), tasks_(tasks), interrupted_(interrupted) {}

  // Calls task(thread, n) for n = 0, 1, ... A cancelled loop still calls every task: `cancelled()` says to skip.
  template <class F> bool run(F task) {
    struct Shared { Loop *loop; F *task; } shared{this, &task};
    parallel(static_cast<int>(least(threads_, tasks_)), [](void *p) {
      auto s = static_cast<Shared *>(p);
      int thread = s->loop->entered_++;
      for (int64_t n; (n = s->loop->next_++) < s->loop->tasks_;) {
        (*s->task)(thread, n);
        s->loop->ask();
      }
    }, &shared);
    return !cancelled();
  }
  bool cancelled() const { return cancelled_; }

 private:
  void ask() {
    if (std::this_thread::get_id() != caller_ || cancelled_) return;
    auto now = std::chrono::steady_clock::now();
    if (now - asked_ < std::chrono::milliseconds(100)) return;
    asked_ = now;
    if (interrupted_()) cancelled_ = true;
  }

  int64_t threads_, tasks_;
  bool (*interrupted_)();
  std::atomic<int> entered_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<bool> cancelled_{false};
  std::thread::id caller_ = std::this_thread::get_id();
  std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

}  // namespace EINSIGHT_PRECISION
}  // namespace einsight
