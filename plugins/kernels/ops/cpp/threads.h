// Runs independent items of work on several threads: the threads of torch's OpenMP pool.
//
// A pool of our own would compete with torch's: its idle threads spin for a while after each operation, on the cores
// that our threads need. So we look up the entry point of the OpenMP library that torch has loaded into the process.
// Without one (for example on macOS), all items run on the calling thread.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace minisgl {

using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

inline GompParallel FindGompParallel() {
  static const auto found = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  return found;
}

// Calls body(i) for each i in [0, items), on at most `threads` threads. A thread takes the next item when it has
// finished one, so items may differ in cost. `body` must not throw.
template <typename Body>
void ParallelFor(int64_t items, int64_t threads, const Body& body) {
  std::atomic<int64_t> next{0};
  // Not inlined: with a copy each for one thread and for several, the compiler could fuse other multiplications and
  // additions in each of them, and the last bit of a result would depend on the number of threads.
  auto worker = [&]() __attribute__((noinline)) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < items;) body(i);
  };
  threads = std::min(threads, items);
  const GompParallel parallel = FindGompParallel();
  if (threads <= 1 || parallel == nullptr) return worker();
  parallel([](void* data) { (*static_cast<decltype(worker)*>(data))(); }, &worker, static_cast<unsigned>(threads), 0);
}

}  // namespace minisgl
