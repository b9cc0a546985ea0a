// cut with portable vectors: cpu::topk() finds the value of a row's cut, and the positions of the
// entries that are equal to it decide how many of them are taken. Rows run in parallel. Budget:
// topk's passes over up to W * K values, 4 B each, in L2.
#include <algorithm>

#include "cpu/threads.h"
#include "cut/kernel.h"

namespace winnow::internal::cut {

namespace {

// The candidates of a row, side by side, and room for an index or a position of each.
class Row {
 public:
  Row(const Params& p, std::byte* scratch) {
    const int64_t most = p.width * p.blocks;
    values_ = reinterpret_cast<float*>(scratch);
    positions_ = reinterpret_cast<int32_t*>(values_ + most);
    picked_ = positions_ + most;
  }

  void load(const Params& p, int64_t t) {
    size_ = 0;
    for (int32_t b = 0; b < p.blocks; ++b) {
      const float* const values = p.values(t, b);
      const int32_t* const positions = p.positions_in(t, b);
      for (int64_t k = 0; k < p.width; ++k) {
        values_[size_] = values[k];
        positions_[size_] = positions[k];
        size_ += positions[k] >= 0;
      }
    }
  }

  int64_t find_cut(int64_t k) {
    if (size_ <= k || k == 0) return kTakeAll;
    cpu::topk({values_, size_}, {picked_, static_cast<size_t>(k)}, false);
    int32_t lowest = INT32_MAX;
    int64_t ties = 0;
    for (int64_t i = 0; i < k; ++i) {
      const int32_t key = cpu::order_key(values_[picked_[i]]);
      ties = key < lowest ? 1 : ties + (key == lowest);
      lowest = std::min(lowest, key);
    }
    // topk() took `ties` of the entries equal to the lowest; the row takes those of the lowest
    // positions.
    int32_t* last = picked_;
    for (int64_t i = 0; i < size_; ++i)
      if (cpu::order_key(values_[i]) == lowest) *last++ = positions_[i];
    std::nth_element(picked_, picked_ + ties - 1, last);
    return order_of_key(lowest, picked_[ties - 1]);
  }

  void collect(int64_t cut, std::span<int32_t> out) const {
    auto last = out.begin();
    for (int64_t i = 0; i < size_ && last != out.end(); ++i)
      if (order_of(values_[i], positions_[i]) >= cut) *last++ = positions_[i];
    std::sort(out.begin(), last);
    std::fill(last, out.end(), -1);
  }

 private:
  float* values_;
  int32_t* positions_;
  int32_t* picked_;
  int64_t size_ = 0;
};

}  // namespace

void simd(const Params& p) noexcept {
  const size_t bytes = scratch_bytes(p.width, p.blocks);
  cpu::parallel_for(p.rows, [&](int64_t t, int worker) {
    Row row(p, p.scratch + worker * bytes);
    row.load(p, t);
    p.cuts[t] = row.find_cut(p.width);
    if (p.positions)
      row.collect(p.cuts[t], {p.positions + t * p.position_stride, static_cast<size_t>(p.width)});
  });
  if (p.keeping) keep(*p.keeping);
}

}  // namespace winnow::internal::cut
