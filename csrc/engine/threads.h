// The compute threads of a forward. Each takes a loop's items from a stretch of its own, in order, for neighbours lie side by side in memory; and then
// from the others' stretches, so that a thread which the system holds up delays only the item that it is at.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace sterna {

// `threads` threads, the calling one among them. One thread calls; the others wait for it: spinning for a moment between two loops of a
// forward (`Awake`), asleep otherwise.
class ThreadPool {
 public:
  // Throws std::system_error where the system gives fewer.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return int(workers_.size()) + 1; }

  // body(item, thread) for every item in 0 .. count - 1, in no order to rely on, thread in 0 .. size() - 1. Returns when all are done. Everything that
  // the caller wrote before is seen by the bodies, and what they wrote by the caller. Bodies don't throw.
  template <class Body>
  void each(int64_t count, const Body& body) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
      for (int64_t i = 0; i < count; ++i) body(i, 0);
      return;
    }
    run(count, [](const void* context, int64_t i, int thread) { (*static_cast<const Body*>(context))(i, thread); }, &body);
  }

  // While it lives, waiting threads spin before they sleep.
  class Awake {
   public:
    explicit Awake(ThreadPool& pool) : pool_(pool) { pool_.awake_.store(true, std::memory_order_relaxed); }
    ~Awake() { pool_.awake_.store(false, std::memory_order_relaxed); }
    Awake(const Awake&) = delete;
    Awake& operator=(const Awake&) = delete;

   private:
    ThreadPool& pool_;
  };

 private:
  using Item = void (*)(const void* context, int64_t item, int thread);

  void end();
  void run(int64_t count, Item item, const void* context);
  void work(int thread);
  uint64_t wait_for_round(uint64_t seen);
  void take_items(int thread);

  std::vector<std::thread> workers_;
  std::atomic<bool> awake_{false};

  // A round is one call of `each`; it is open while round_ is odd. A worker counts itself in and then looks whether the round is still open; the
  // caller closes it when no item is left and waits for those inside. So nobody waits for a worker that slept through it.
  std::atomic<uint64_t> round_{0};
  std::atomic<int> inside_{0};
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<Stretch> stretches_;  // one per thread
  Item item_ = nullptr;
  const void* context_ = nullptr;

  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<int> asleep_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace sterna
