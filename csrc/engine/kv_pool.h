// Memory for keys and values, in pages of kPage slots (kernels.h has a page's layout): reserved whole, touched by the system as pages are first written.
#pragma once

#include <cstddef>
#include <vector>

#include "model.h"

namespace sterna {

class KVPool {
 public:
  // `slots[g]`: slots of group g, a multiple of kPage. Throws std::bad_alloc where the system reserves no such range.
  KVPool(const Model& model, const std::vector<int64_t>& slots);
  ~KVPool();
  KVPool(const KVPool&) = delete;
  KVPool& operator=(const KVPool&) = delete;

  int64_t pages(int group) const { return pages_[group]; }
  // All key heads of one page of one layer, page_head_bytes(head_dim) apart.
  uint8_t* page(int layer, int64_t page) const { return layers_[layer].base + page * layers_[layer].page_bytes; }
  size_t page_bytes(int layer) const { return layers_[layer].page_bytes; }
  size_t bytes() const { return bytes_; }

 private:
  struct LayerPages {
    uint8_t* base;
    size_t page_bytes;
  };
  std::vector<LayerPages> layers_;
  std::vector<int64_t> pages_;
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace sterna
