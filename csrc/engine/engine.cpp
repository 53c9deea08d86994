#include "engine.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>

#include "kernels/flush.h"

namespace sterna {

Engine::Engine(Model model, const Kernels& kernels, const std::vector<int64_t>& slots, int threads)
    : model_(std::move(model)),
      kernels_(kernels),
      pool_(model_, slots),
      threads_(threads),
      forward_(model_, kernels_, pool_, threads_),
      sampler_(model_.vocab_size, kernels_),
      scratch_(threads),
      driver_([this] { drive(); }) {}

Engine::~Engine() { stop(); }

void Engine::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    for (const Step& step : queue_) outcomes_.at(step.number) = Outcome{{}, std::make_exception_ptr(Abandoned())};
    queue_.clear();
  }
  forward_.abandon();
  queued_.notify_all();
  done_.notify_all();
  if (driver_.joinable()) driver_.join();
}

size_t Engine::queued() {
  std::lock_guard<std::mutex> lock(mutex_);
  return queue_.size();
}

void Engine::bind(int row, const SamplingOptions& options, const int32_t* prompt, size_t prompt_len, const int32_t* output, size_t output_len) {
  std::unique_lock<std::shared_mutex> lock(sampler_mutex_);
  sampler_.bind(row, options, prompt, prompt_len, output, output_len);
}

void Engine::release(int row) {
  std::unique_lock<std::shared_mutex> lock(sampler_mutex_);
  sampler_.release(row);
}

void Engine::set_mask(int row, const uint32_t* words, size_t count) {
  std::unique_lock<std::shared_mutex> lock(sampler_mutex_);
  sampler_.set_mask(row, words, count);
}

void Engine::submit(Step step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_) throw Abandoned();
    if (!outcomes_.try_emplace(step.number).second) throw std::invalid_argument("step " + std::to_string(step.number) + " is submitted already");
    queue_.push_back(std::move(step));
  }
  queued_.notify_one();
}

StepResult Engine::wait(int64_t number) {
  std::unique_lock<std::mutex> lock(mutex_);
  auto found = outcomes_.end();
  done_.wait(lock, [&] {
    found = outcomes_.find(number);
    return found == outcomes_.end() || found->second.has_value();
  });
  if (found == outcomes_.end()) throw std::invalid_argument("step " + std::to_string(number) + " was not submitted, or its result was taken");
  Outcome outcome = std::move(*found->second);
  outcomes_.erase(found);
  lock.unlock();
  if (outcome.fault) std::rethrow_exception(outcome.fault);
  return std::move(outcome.result);
}

void Engine::drive() {
  FlushSubnormals flush;
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    wait_for_step(lock);
    if (stopping_) return;
    Step step = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();

    Outcome outcome;
    try {
      outcome.result = compute(step);
    } catch (...) {
      outcome.fault = std::current_exception();
      last_number_ = -1;
    }

    lock.lock();
    outcomes_.at(step.number) = std::move(outcome);
    lock.unlock();
    done_.notify_all();
  }
}

// Meanwhile memory is had for keys and values to come, unless the next step is only being prepared.
void Engine::wait_for_step(std::unique_lock<std::mutex>& lock) {
  constexpr std::chrono::milliseconds kIdle(20);
  const auto wanted = [this] { return stopping_ || !queue_.empty(); };
  if (queued_.wait_for(lock, kIdle, wanted)) return;
  bool more = true;
  while (more && !wanted()) {
    lock.unlock();
    more = forward_.touch_ahead();
    lock.lock();
  }
  queued_.wait(lock, wanted);
}

StepResult Engine::compute(Step& step) {
  StepResult result{step.number, std::vector<SampledToken>(step.rows.size())};
  {
    std::shared_lock<std::shared_mutex> lock(sampler_mutex_);
    for (const Row& row : step.rows) {
      if (row.input_from >= 0) step.input_ids[row.first_token] = token_of_last(step.number, row.input_from);
      if (row.wants_sample) require_bound(row.pool_index);
    }
  }
  forward_.run(step, [&](int row, float* logits, int thread) {
    std::shared_lock<std::shared_mutex> lock(sampler_mutex_);
    require_bound(step.rows[row].pool_index);  // again: whoever releases a row of a step that runs gets an error, not memory that is gone
    result.rows[row] = sampler_.sample(step.rows[row].pool_index, logits, scratch_[thread]);
  });
  last_number_ = step.number;
  last_tokens_.clear();
  for (const SampledToken& each : result.rows) last_tokens_.push_back(each.token);
  return result;
}

void Engine::require_bound(int row) const {
  if (!sampler_.is_bound(row)) throw std::invalid_argument("row " + std::to_string(row) + " wants a sample and isn't bound");
}

// A row without a token has ended; what is computed on top of it is nobody's.
int32_t Engine::token_of_last(int64_t number, int row) const {
  if (last_number_ != number - 1 || size_t(row) >= last_tokens_.size())
    throw std::invalid_argument("step " + std::to_string(number) + " takes a token of the step before, which has none there");
  return std::max(0, last_tokens_[row]);
}

}  // namespace sterna
