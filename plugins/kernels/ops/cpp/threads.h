// Runs independent items of work on several threads: the threads of torch's OpenMP pool.
//
// A pool of our own would compete with torch's: its idle threads spin for a while after each operation, on the cores
// that our threads need. So we look up the entry point of the OpenMP library that torch has loaded into the process.
// Without one (for example on macOS), all items run on the calling thread.
//
// The threads of the pool sleep between two calls of ParallelFor, and to wake one takes about as long as a small matrix
// product. `WithTeam` keeps them awake while a function runs that calls ParallelFor many times.
#pragma once

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>

namespace minisgl {

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

inline GompParallel FindGompParallel() {
  static const auto found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Threads that wait for work without sleeping: a leader, which calls `For`, and helpers, which call `Help`. A helper that
// is late or interrupted holds up nothing but an item that it has begun.
class Team {
 public:
  // Calls body(i) for each i in [0, items), on the leader and the helpers.
  template <typename Body>
  void For(int64_t items, const Body& body) {
    if (items <= 1 || items > kMask) {
      for (int64_t i = 0; i < items; ++i) body(i);
      return;
    }
    run_.store([](const void* data, int64_t i) { (*static_cast<const Body*>(data))(i); }, std::memory_order_relaxed);
    data_.store(&body, std::memory_order_relaxed);
    finished_.store(0, std::memory_order_relaxed);
    job_.store(++number_ << 2 * kBits | static_cast<uint64_t>(items) << kBits, std::memory_order_release);
    while (Item()) {
    }
    for (int64_t turns = 0; finished_.load(std::memory_order_acquire) < items; ++turns) Wait(turns);
  }

  void Help() {
    for (int64_t turns = 0; !over_.load(std::memory_order_acquire); ++turns) {
      if (Item()) {
        turns = 0;
      } else {
        Wait(turns);
      }
    }
  }

  void End() { over_.store(true, std::memory_order_release); }

 private:
  static constexpr int kBits = 20;
  static constexpr int64_t kMask = (1 << kBits) - 1;
  static constexpr int64_t kTurns = 4000;  // about 50 microseconds; then another program may have the core

  static void Wait(int64_t turns) {
    if (turns < kTurns) {
      Pause();
    } else {
      sched_yield();
    }
  }

  // Runs one item, if there is one left. While a job has items that no thread has taken, the leader writes no other job,
  // so the exchange succeeds only if `run_` and `data_` are those of the same job.
  bool Item() {
    uint64_t job = job_.load(std::memory_order_acquire);
    const int64_t next = job & kMask, items = job >> kBits & kMask;
    if (next >= items) return false;
    const auto run = run_.load(std::memory_order_relaxed);
    const void* const data = data_.load(std::memory_order_relaxed);
    if (!job_.compare_exchange_strong(job, job + 1, std::memory_order_acq_rel)) return true;
    run(data, next);
    finished_.fetch_add(1, std::memory_order_release);
    return true;
  }

  alignas(64) std::atomic<uint64_t> job_{0};  // its number, how many items it has, and the next one
  std::atomic<void (*)(const void*, int64_t)> run_{nullptr};
  std::atomic<const void*> data_{nullptr};
  std::atomic<bool> over_{false};
  alignas(64) std::atomic<int64_t> finished_{0};
  uint64_t number_ = 0;
};

inline thread_local Team* current_team = nullptr;  // whose leader this thread is

inline bool InTeam() { return current_team != nullptr; }

// Calls body(i) for each i in [0, items), on at most `threads` threads. A thread takes the next item when it has
// finished one, so items may differ in cost. `body` must not throw.
template <typename Body>
void ParallelFor(int64_t items, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  // Not inlined: with a copy each for one thread and for several, the compiler could fuse other multiplications and
  // additions in each of them, and the last bit of a result would depend on the number of threads.
  const auto item = [&](int64_t i) __attribute__((noinline)) { body(i); };
  const auto worker = [&] {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) item(i);
  };
  threads = std::min(threads, items);
  const GompParallel parallel = FindGompParallel();
  if (threads <= 1 || parallel == nullptr) return worker();
  if (current_team != nullptr) return current_team->For(items, item);
  parallel([](void* data) { (*static_cast<decltype(worker)*>(data))(); }, const_cast<void*>(static_cast<const void*>(&worker)),
           static_cast<unsigned>(threads), 0);
}

// Calls program(), whose calls of ParallelFor are computed by `threads` threads that do not sleep in between.
template <typename Program>
void WithTeam(int64_t threads, const Program& program) {
  const GompParallel parallel = FindGompParallel();
  if (threads <= 1 || parallel == nullptr) return program();
  struct Run {
    const Program& program;
    pthread_t leader;
    Team team;
    std::exception_ptr error;
  } run{program, pthread_self(), {}, nullptr};
  parallel(
      [](void* data) {
        Run& run = *static_cast<Run*>(data);
        if (!pthread_equal(run.leader, pthread_self())) return run.team.Help();
        current_team = &run.team;
        try {
          run.program();
        } catch (...) {
          run.error = std::current_exception();
        }
        current_team = nullptr;
        run.team.End();
      },
      &run, static_cast<unsigned>(threads), 0);
  if (run.error) std::rethrow_exception(run.error);
}

}  // namespace minisgl
