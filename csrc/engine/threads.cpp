#include "threads.h"

#include "kernels/flush.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace sterna {
namespace {

// About 50 microseconds: longer than what lies between two loops of a forward, far shorter than a time slice.
constexpr int kSpins = 1500;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads) : stretches_(size_t(threads)) {
  try {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  } catch (...) {
    end();  // a thread that nobody joins would end the process
    throw;
  }
}

ThreadPool::~ThreadPool() { end(); }

void ThreadPool::end() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::run(int64_t count, Item item, const void* context) {
  item_ = item;
  context_ = context;
  const int64_t threads = int64_t(stretches_.size());
  for (int64_t t = 0; t < threads; ++t) {
    stretches_[t].next.store(count * t / threads, std::memory_order_relaxed);
    stretches_[t].end = count * (t + 1) / threads;
  }
  round_.fetch_add(1);
  if (asleep_.load() > 0) {
    // A sleeper checks the round under the lock before it sleeps, so it either sees the new one or gets this.
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  take_items(0);
  round_.fetch_add(1);
  for (int spins = 0; inside_.load() > 0; ++spins) {
    pause();
    // Whoever is late may be waiting for this very core.
    if (spins >= kSpins) std::this_thread::yield();
  }
}

void ThreadPool::take_items(int thread) {
  const size_t threads = stretches_.size();
  for (size_t t = 0; t < threads; ++t) {
    Stretch& stretch = stretches_[(size_t(thread) + t) % threads];
    for (int64_t i; (i = stretch.next.fetch_add(1, std::memory_order_relaxed)) < stretch.end;) item_(context_, i, thread);
  }
}

uint64_t ThreadPool::wait_for_round(uint64_t seen) {
  auto fresh = [seen](uint64_t round) { return round != seen && round % 2 == 1; };
  for (int spins = 0; spins < kSpins && awake_.load(std::memory_order_relaxed); ++spins) {
    const uint64_t round = round_.load();
    if (fresh(round)) return round;
    pause();
  }
  std::unique_lock<std::mutex> lock(mutex_);
  asleep_.fetch_add(1);
  wake_.wait(lock, [this, fresh] { return fresh(round_.load()) || stop_.load(); });
  asleep_.fetch_sub(1);
  return round_.load();
}

void ThreadPool::work(int thread) {
  FlushSubnormals flush;
  uint64_t seen = 0;
  while (!stop_.load()) {
    const uint64_t round = wait_for_round(seen);
    inside_.fetch_add(1);
    if (round % 2 == 1 && round_.load() == round) take_items(thread);
    inside_.fetch_sub(1);
    seen = round;
  }
}

}  // namespace sterna
