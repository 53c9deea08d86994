#include "kv_pool.h"

#include <new>

#include <sys/mman.h>

namespace sterna {

KVPool::KVPool(const Model& model, const std::vector<int64_t>& slots) {
  for (int64_t each : slots) pages_.push_back(each / kPage);
  std::vector<size_t> offsets;
  for (const Layer& layer : model.layers) {
    const Attention& a = layer.attention;
    layers_.push_back({nullptr, size_t(a.kv_heads) * page_head_bytes(a.head_dim)});
    offsets.push_back(bytes_);
    bytes_ += (layers_.back().page_bytes * size_t(pages_[a.kv_group]) + 4095) / 4096 * 4096;
  }
  if (bytes_ == 0) return;
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // Attention jumps from page to page: with small pages of the system, half its time would go into finding them.
  madvise(memory_, bytes_, MADV_HUGEPAGE);
#endif
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i].base = static_cast<uint8_t*>(memory_) + offsets[i];
}

KVPool::~KVPool() {
  if (memory_ != nullptr && memory_ != MAP_FAILED) munmap(memory_, bytes_);
}

}  // namespace sterna
