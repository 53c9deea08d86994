// Memory for keys and values, in pages of kPage slots (kernels.h has a page's layout): reserved whole, and had from the system as it is first written.
//
// The layers' parts of a page lie side by side, so that memory is had as slots are used, and not for each layer's first page at once.
//
// The system clears what it gives, a huge page at a time; and where the machine is a guest, its host may have to find that memory first: milliseconds,
// which spread over the tokens that find room there are up to a tenth of computing them. So pieces of that size are touched before a step that writes to
// them, by all threads at once, and a lead of them while there is nothing to compute.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <vector>

#include "model.h"

namespace sterna {

class KVPool {
 public:
  // Memory within one huge page of 2 MB, or within 2 MB of a larger one.
  struct Piece {
    uint8_t* begin;
    uint8_t* end;
  };
  // `slots[g]`: slots of group g, a multiple of kPage. Throws std::bad_alloc where the system reserves no such range.
  KVPool(const Model& model, const std::vector<int64_t>& slots);
  ~KVPool();
  KVPool(const KVPool&) = delete;
  KVPool& operator=(const KVPool&) = delete;

  int groups() const { return int(groups_.size()); }
  int64_t pages(int group) const { return groups_[group].pages; }
  // A layer's part of a page of its group: all its key heads, page_head_bytes(head_dim) apart.
  uint8_t* page(int layer, int64_t page) const { return layers_[layer].base + page * page_stride(layer); }
  size_t page_bytes(int layer) const { return layers_[layer].page_bytes; }
  // From page to page of a layer.
  size_t page_stride(int layer) const { return groups_[layers_[layer].group].page_stride; }
  size_t bytes() const { return bytes_; }
  // At most so much is touched ahead of use.
  size_t lead_bytes() const { return std::min<size_t>(256 << 20, bytes_ / 8); }

  // Of `bytes`, what was in a piece.
  size_t touched_bytes() const { return touched_bytes_.load(std::memory_order_relaxed); }

  // A step is going to write to pages of the group below `end`: adds to `pieces` what of the memory from the first page to there was in none before. So
  // pages should be used from the lowest on (mem_cache/allocator.py): all of a pool would be touched for its last page.
  void use(int group, int64_t end, std::vector<Piece>& pieces);
  // Adds a piece that comes behind the pages used so far; none, and false, where the lead is there.
  bool look_ahead(std::vector<Piece>& pieces);
  // Has memory for it; what lies there already stays.
  static void touch(Piece piece);

 private:
  struct LayerPart {
    int group;
    uint8_t* base;
    size_t page_bytes;
  };
  struct Group {
    int64_t pages;
    size_t page_stride = 0;
    uint8_t *begin = nullptr, *end = nullptr;
    uint8_t* used = nullptr;     // behind the highest page that a step wrote to
    uint8_t* touched = nullptr;  // behind the last piece
  };

  void add_pieces(Group& group, uint8_t* end, std::vector<Piece>& pieces);

  std::vector<LayerPart> layers_;
  std::vector<Group> groups_;
  std::atomic<size_t> touched_bytes_{0};
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace sterna
