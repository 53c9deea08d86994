// Memory that grows and is aligned to cache lines; its contents are arbitrary after growing.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>
#include <utility>

namespace sterna {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Room for `size` elements; throws std::bad_alloc.
  T* reserve(size_t size) {
    if (size <= size_) return data_;
    std::free(data_);
    size_ = 0;
    data_ = static_cast<T*>(std::aligned_alloc(64, (size * sizeof(T) + 63) / 64 * 64));
    if (data_ == nullptr) throw std::bad_alloc();
    size_ = size;
    return data_;
  }
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace sterna
