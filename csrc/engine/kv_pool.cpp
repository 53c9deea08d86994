#include "kv_pool.h"

#include <algorithm>
#include <new>

#include <sys/mman.h>

namespace sterna {
namespace {

constexpr size_t kPieceBytes = 2 << 20;
constexpr size_t kSystemPage = 4096;  // the smallest there is

size_t whole_pages(size_t bytes) { return (bytes + kSystemPage - 1) / kSystemPage * kSystemPage; }

uint8_t* end_of_piece(const uint8_t* at) { return reinterpret_cast<uint8_t*>(reinterpret_cast<uintptr_t>(at) / kPieceBytes * kPieceBytes + kPieceBytes); }

}  // namespace

KVPool::KVPool(const Model& model, const std::vector<int64_t>& slots) {
  for (int64_t each : slots) groups_.push_back({each / kPage});
  std::vector<size_t> offsets;
  for (const Layer& layer : model.layers) {
    const Attention& a = layer.attention;
    Group& group = groups_[a.kv_group];
    layers_.push_back({a.kv_group, nullptr, size_t(a.kv_heads) * page_head_bytes(a.head_dim)});
    offsets.push_back(group.page_stride);
    group.page_stride += layers_.back().page_bytes;
  }
  for (const Group& group : groups_) bytes_ += whole_pages(group.page_stride * size_t(group.pages));
  if (bytes_ == 0) return;
  memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory_ == MAP_FAILED) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  // Attention jumps from page to page: with small pages of the system, half its time would go into finding them.
  madvise(memory_, bytes_, MADV_HUGEPAGE);
#endif
  uint8_t* next = static_cast<uint8_t*>(memory_);
  for (Group& group : groups_) {
    group.begin = group.used = group.touched = next;
    group.end = group.begin + group.page_stride * size_t(group.pages);
    next += whole_pages(group.page_stride * size_t(group.pages));
  }
  for (size_t i = 0; i < layers_.size(); ++i) layers_[i].base = groups_[layers_[i].group].begin + offsets[i];
}

KVPool::~KVPool() {
  if (memory_ != nullptr && memory_ != MAP_FAILED) munmap(memory_, bytes_);
}

void KVPool::add_pieces(Group& group, uint8_t* end, std::vector<Piece>& pieces) {
  while (group.touched < end) {
    uint8_t* const next = std::min(end_of_piece(group.touched), group.end);
    pieces.push_back({group.touched, next});
    touched_bytes_.fetch_add(size_t(next - group.touched), std::memory_order_relaxed);
    group.touched = next;
  }
}

void KVPool::use(int group, int64_t end, std::vector<Piece>& pieces) {
  Group& pages = groups_[group];
  pages.used = std::max(pages.used, pages.begin + pages.page_stride * size_t(end));
  add_pieces(pages, pages.used, pieces);
}

bool KVPool::look_ahead(std::vector<Piece>& pieces) {
  for (Group& group : groups_) {
    const size_t size = size_t(group.end - group.begin);
    if (size == 0) continue;
    const size_t lead = size_t(double(size) / double(bytes_) * double(lead_bytes()));  // the group's share of it
    uint8_t* const wanted = group.used + std::min(lead, size_t(group.end - group.used));
    if (group.touched >= wanted) continue;
    add_pieces(group, group.touched + 1, pieces);
    return true;
  }
  return false;
}

// A write that changes nothing, whoever else may be writing. A compiler may make a load of an atomic `or` with zero, which has no memory for it.
void KVPool::touch(Piece piece) {
  for (uint8_t* at = piece.begin; at < piece.end; at += kSystemPage) {
    uint8_t fresh = 0;
    __atomic_compare_exchange_n(static_cast<volatile uint8_t*>(at), &fresh, uint8_t(0), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

}  // namespace sterna
