// Steps, one after another, on threads of their own: `submit` returns at once, `wait` when the step is done.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <thread>

#include "forward.h"
#include "sampler.h"

namespace sterna {

class Engine {
 public:
  // `slots`: per KV group, a multiple of kPage. Throws std::bad_alloc where memory for keys and values can't be had, std::system_error
  // where threads can't.
  Engine(Model model, const Kernels& kernels, const std::vector<int64_t>& slots, int threads);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Model& model() const { return model_; }
  const Kernels& kernels() const { return kernels_; }
  KVPool& pool() { return pool_; }

  // Sampler state of a row of the pool of requests; while a step samples, they wait.
  void bind(int row, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len);
  void release(int row);
  void set_mask(int row, const uint32_t* words, size_t count);

  // Queue a step. Its rows are checked (bindings/step_reader.cpp), and bound where they want a sample (else its result is an error).
  void submit(Step step);
  // The step's result, once. Throws what the step failed with; std::invalid_argument for a number that was never submitted.
  StepResult wait(int64_t number);
  // Drop the steps that have not begun, leave the one that runs at its next layer, and end the thread that runs them. Results that are there can
  // still be waited for; for the others `wait` throws Abandoned, and so does `submit` afterwards. Idempotent.
  void stop();
  // Steps that have not begun.
  size_t queued();

 private:
  struct Outcome {
    StepResult result;
    std::exception_ptr fault;
  };

  void drive();
  void wait_for_step(std::unique_lock<std::mutex>& lock);
  StepResult compute(Step& step);
  void require_bound(int row) const;
  int32_t token_of_last(int64_t number, int row) const;

  const Model model_;
  const Kernels& kernels_;
  KVPool pool_;
  ThreadPool threads_;
  Forward forward_;
  std::shared_mutex sampler_mutex_;  // shared by those who sample, each another row
  Sampler sampler_;
  std::vector<SamplerScratch> scratch_;
  // Of the step before, for rows that take its tokens.
  int64_t last_number_ = -1;
  std::vector<int32_t> last_tokens_;

  std::mutex mutex_;
  std::condition_variable queued_, done_;
  std::deque<Step> queue_;
  std::map<int64_t, std::optional<Outcome>> outcomes_;  // of steps submitted and not yet taken; empty until one is done
  bool stopping_ = false;
  std::thread driver_;
};

}  // namespace sterna
