#include "core/overlap.h"

#include <algorithm>

namespace winnow::internal::core {

namespace {

// A view as bytes: a run of `run` bytes at every sum of k_i * step_i, 0 <= k_i < count_i.
struct Runs {
  int64_t run = 0;
  Dimension dims[4];  // strides in bytes, rising
  int rank = 0;
};

Runs runs_of(const Tensor& t) {
  Runs r;
  r.run = size_of(t.dtype);
  for (const auto& [stride, count] : dimensions_of(t)) {
    if (count == 1) continue;
    const int64_t step = stride * size_of(t.dtype);
    Dimension* const inner = r.rank > 0 ? &r.dims[r.rank - 1] : nullptr;
    if (!inner && step <= r.run) r.run += (count - 1) * step;  // runs that touch are one
    else if (inner && step == inner->stride * inner->count) inner->count *= count;
    else r.dims[r.rank++] = {step, count};
  }
  return r;
}

// x * step with least <= x <= most; falling steps.
struct Term {
  int64_t step = 0, least = 0, most = 0;
};

int64_t floor_div(int64_t value, int64_t divisor) {
  const int64_t quotient = value / divisor;
  return quotient - (value % divisor < 0 ? 1 : 0);
}

// Looks for a sum of terms within [low, high]. Where the steps are nested, as those of tensors are,
// each term has at most three candidates.
class Search {
 public:
  void add(int64_t step, int64_t least, int64_t most) {
    for (int i = 0; i < count_; ++i) {
      if (terms_[i].step != step) continue;
      terms_[i].least += least;
      terms_[i].most += most;
      return;
    }
    int at = count_++;
    for (; at > 0 && terms_[at - 1].step < step; --at) terms_[at] = terms_[at - 1];
    terms_[at] = {step, least, most};
  }

  bool finds(int64_t low, int64_t high) {
    Term rest;  // the sum of the terms behind one
    for (int i = count_ - 1; i >= 0; --i) {
      rest_[i] = rest;
      rest.least += terms_[i].step * terms_[i].least;
      rest.most += terms_[i].step * terms_[i].most;
    }
    return finds_from(0, low, high);
  }

 private:
  bool finds_from(int at, int64_t low, int64_t high) {
    if (at == count_) return low <= 0 && 0 <= high;
    const Term& term = terms_[at];
    const int64_t first = std::max(term.least, -floor_div(rest_[at].most - low, term.step));
    const int64_t last = std::min(term.most, floor_div(high - rest_[at].least, term.step));
    for (int64_t x = first; x <= last; ++x) {
      if (--tries_ < 0) return false;
      if (finds_from(at + 1, low - x * term.step, high - x * term.step)) return true;
    }
    return false;
  }

  Term terms_[8];
  Term rest_[8];
  int count_ = 0;
  int tries_ = kMostTries;
};

}  // namespace

std::array<Dimension, 4> dimensions_of(const Tensor& t) {
  std::array<Dimension, 4> dims;
  int count = 0;
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] <= 1) continue;
    int at = count++;
    for (; at > 0 && dims[at - 1].stride > t.stride[i]; --at) dims[at] = dims[at - 1];
    dims[at] = {t.stride[i], t.shape[i]};
  }
  return dims;
}

Addresses addresses_of(const Tensor& t) {
  if (t.size() == 0) return {};
  int64_t elements = 1;
  for (int i = 0; i < t.rank; ++i) elements += (t.shape[i] - 1) * t.stride[i];
  return {reinterpret_cast<uintptr_t>(t.data), elements * size_of(t.dtype)};
}

bool same_view(const Tensor& a, const Tensor& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] != b.shape[i]) return false;
    if (a.shape[i] > 1 && a.stride[i] != b.stride[i]) return false;
  }
  return true;
}

bool share_bytes(const Tensor& a, const Tensor& b) {
  const Addresses of_a = addresses_of(a);
  const Addresses of_b = addresses_of(b);
  constexpr int64_t kMostBytes = INT64_MAX / 8;  // sums below stay within 64 bits
  if (!of_a.meet(of_b) || of_a.bytes > kMostBytes || of_b.bytes > kMostBytes) return false;
  const Runs runs_a = runs_of(a);
  const Runs runs_b = runs_of(b);
  Search search;
  for (int i = 0; i < runs_a.rank; ++i)
    search.add(runs_a.dims[i].stride, 1 - runs_a.dims[i].count, 0);
  for (int i = 0; i < runs_b.rank; ++i)
    search.add(runs_b.dims[i].stride, 0, runs_b.dims[i].count - 1);
  // A run of b less one of a begins `distance` further on, and they share bytes where that is above
  // -run of b and below run of a.
  const auto distance = static_cast<int64_t>(of_b.begin - of_a.begin);
  return search.finds(1 - runs_b.run - distance, runs_a.run - 1 - distance);
}

}  // namespace winnow::internal::core
