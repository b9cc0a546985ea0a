// Top-k by narrowing a bracket of integer keys: a sample of the row gives a first guess, vector
// passes count the elements above and inside it, and once few enough are inside (or all of them are
// equal) they are looked at one by one. A last pass collects the indices in ascending order. A bad
// sample costs passes, never exactness: the bracket shrinks to a third each time.
#include "cpu/topk.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/topk.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#ifndef WINNOW_CPU_TOPK_TYPES
#define WINNOW_CPU_TOPK_TYPES
namespace winnow::internal::cpu {
namespace {

struct Counts {
  int64_t above = 0;  // keys > hi
  int64_t from = 0;   // keys >= lo
};
struct Bracket {
  int32_t lo = INT32_MIN, hi = INT32_MAX;
};
// Take every key above `key` and the first `ties` equal to it.
struct Cut {
  int32_t key = 0;
  int64_t ties = 0;
};

}  // namespace
}  // namespace winnow::internal::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;
using D = hn::ScalableTag<int32_t>;

// order_key() of whole vectors.
HWY_INLINE hn::Vec<D> keys_at(D d, const float* values) {
  const auto bits = hn::LoadU(d, reinterpret_cast<const int32_t*>(values));
  const auto magnitude = hn::And(bits, hn::Set(d, 0x7fffffff));
  const auto sign = hn::ShiftRight<31>(bits);
  const auto key = hn::Sub(hn::Xor(magnitude, sign), sign);
  const auto nan = hn::Gt(magnitude, hn::Set(d, 0x7f800000));
  return hn::IfThenElse(nan, hn::Set(d, INT32_MIN), key);
}

Counts count_keys(const float* values, int64_t n, Bracket b) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto lo = hn::Set(d, b.lo), hi = hn::Set(d, b.hi);
  int64_t above = 0, below = 0, i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto key = keys_at(d, values + i);
    above += static_cast<int64_t>(hn::CountTrue(d, hn::Gt(key, hi)));
    below += static_cast<int64_t>(hn::CountTrue(d, hn::Gt(lo, key)));
  }
  for (; i < n; ++i) {
    const int32_t key = order_key(values[i]);
    above += key > b.hi;
    below += key < b.lo;
  }
  return {above, n - below};
}

// Appends the keys inside the bracket to `out`, which has room for them all and a vector more.
int64_t keys_inside(const float* values, int64_t n, Bracket b, int32_t* out) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto lo = hn::Set(d, b.lo), hi = hn::Set(d, b.hi);
  int64_t i = 0, found = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto key = keys_at(d, values + i);
    const auto in = hn::Not(hn::Or(hn::Gt(key, hi), hn::Gt(lo, key)));
    hn::StoreU(hn::Compress(key, in), d, out + found);
    found += static_cast<int64_t>(hn::CountTrue(d, in));
  }
  for (; i < n; ++i) {
    const int32_t key = order_key(values[i]);
    if (b.lo <= key && key <= b.hi) out[found++] = key;
  }
  return found;
}

// The k-th largest of n keys inside the bracket, by halving the bracket. A pass over 4,096 keys in
// L1 takes some 0.1 us and has no branch to mispredict: half the time of std::nth_element.
int32_t kth(std::span<const int32_t> keys, int64_t k, Bracket b) {
  const D d;
  const size_t lanes = hn::Lanes(d);
  while (b.lo < b.hi) {
    const auto middle = static_cast<int32_t>(b.hi - (static_cast<int64_t>(b.hi) - b.lo) / 2);
    const auto below_middle = hn::Set(d, middle - 1);
    int64_t from = 0;
    size_t i = 0;
    for (; i + lanes <= keys.size(); i += lanes)
      from += static_cast<int64_t>(
          hn::CountTrue(d, hn::Gt(hn::LoadU(d, keys.data() + i), below_middle)));
    for (; i < keys.size(); ++i) from += keys[i] >= middle;
    if (from >= k) b.lo = middle;
    else b.hi = middle - 1;
  }
  return b.lo;
}

// Writes the ids of the elements that the cut takes, ascending: exactly ids.size() of them.
void collect_ids(const TopkRow& row, Cut cut, std::span<int32_t> ids) {
  const D d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t room = static_cast<int64_t>(ids.size());
  const auto key_cut = hn::Set(d, cut.key), index = hn::Iota(d, row.base);
  int64_t i = 0, at = 0, ties = cut.ties;
  const auto one = [&](int64_t j) {
    const int32_t key = order_key(row.values[j]);
    if (key > cut.key || (key == cut.key && ties-- > 0))
      ids[at++] = row.base + static_cast<int32_t>(j);
  };
  for (; i + lanes <= row.size && at < room; i += lanes) {
    const auto key = keys_at(d, row.values + i);
    auto take = hn::Gt(key, key_cut);
    if (ties > 0) {
      const auto equal = hn::Eq(key, key_cut);
      const int64_t n = static_cast<int64_t>(hn::CountTrue(d, equal));
      if (n > ties) {  // happens once: the ties end inside this vector
        for (int64_t j = i; j < i + lanes; ++j) one(j);
        continue;
      }
      ties -= n;
      take = hn::Or(take, equal);
    }
    const auto id = hn::Add(index, hn::Set(d, static_cast<int32_t>(i)));
    const auto packed = hn::Compress(id, take);
    const int64_t n = static_cast<int64_t>(hn::CountTrue(d, take));
    if (at + lanes <= room) {
      hn::StoreU(packed, d, ids.data() + at);
    } else {  // a whole vector would write past the end
      HWY_ALIGN int32_t last[HWY_MAX_BYTES / sizeof(int32_t)];
      hn::Store(packed, d, last);
      std::memcpy(ids.data() + at, last, static_cast<size_t>(n) * sizeof(int32_t));
    }
    at += n;
  }
  for (; i < row.size && at < room; ++i) one(i);
}

}  // namespace
}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::cpu {

namespace {

HWY_EXPORT(count_keys);
HWY_EXPORT(keys_inside);
HWY_EXPORT(kth);
HWY_EXPORT(collect_ids);

constexpr int64_t kSample = 1024, kFew = 4096, kVector = 64;
constexpr int kMaxChunks = 64;
constexpr int64_t kMinChunk = 32768;  // some 3 us a pass, as much as handing it out may cost

// A row cut into chunks, one when it is not worth the pool.
class Passes {
 public:
  Passes(const TopkRow& row, bool split) : row_(row) {
    if (split)
      chunks_ = static_cast<int>(
          std::clamp<int64_t>(row.size / kMinChunk, 1, std::min(kMaxChunks, 4 * threads())));
    step_ = ceil_div(row.size, chunks_);
  }

  Counts count(Bracket b) {
    each([&](int c, const TopkRow& part) {
      counts_[c] = HWY_DYNAMIC_DISPATCH(count_keys)(part.values, part.size, b);
    });
    Counts sum;
    for (int c = 0; c < chunks_; ++c) {
      sum.above += counts_[c].above;
      sum.from += counts_[c].from;
    }
    return sum;
  }

  // The keys inside the bracket, at most kFew, in no particular order.
  int64_t inside(Bracket b, int32_t* out) {
    if (chunks_ == 1) return HWY_DYNAMIC_DISPATCH(keys_inside)(row_.values, row_.size, b, out);
    std::atomic<int64_t> found{0};
    each([&](int, const TopkRow& part) {
      int32_t own[kFew + kVector];
      const int64_t n = HWY_DYNAMIC_DISPATCH(keys_inside)(part.values, part.size, b, own);
      std::memcpy(out + found.fetch_add(n), own, static_cast<size_t>(n) * sizeof(int32_t));
    });
    return found;
  }

  void collect(Cut cut, std::span<int32_t> ids) {
    if (chunks_ == 1) return HWY_DYNAMIC_DISPATCH(collect_ids)(row_, cut, ids);
    count({cut.key, cut.key});
    // Where each chunk writes, and how many of the ties are its own.
    int64_t ties[kMaxChunks], starts[kMaxChunks + 1] = {};
    for (int c = 0; c < chunks_; ++c) {
      ties[c] = std::min(cut.ties, counts_[c].from - counts_[c].above);
      cut.ties -= ties[c];
      starts[c + 1] = starts[c] + counts_[c].above + ties[c];
    }
    each([&](int c, const TopkRow& part) {
      HWY_DYNAMIC_DISPATCH(collect_ids)
      (part, Cut{cut.key, ties[c]},
       ids.subspan(static_cast<size_t>(starts[c]), static_cast<size_t>(starts[c + 1] - starts[c])));
    });
  }

 private:
  template <class F>
  void each(F&& f) {
    parallel_for(chunks_, [&](int64_t c, int) {
      const int64_t first = std::min(c * step_, row_.size);
      f(static_cast<int>(c), TopkRow{row_.values + first, std::min(step_, row_.size - first),
                                     row_.base + static_cast<int32_t>(first)});
    });
  }

  TopkRow row_;
  int chunks_ = 1;
  int64_t step_ = 0;
  Counts counts_[kMaxChunks];
};

// A bracket that holds the k-th largest key of most rows: its rank in a sample, plus and minus
// three standard deviations.
Bracket guess(const TopkRow& row, int64_t k) {
  int32_t sample[kSample];
  for (int64_t i = 0; i < kSample; ++i) sample[i] = order_key(row.values[i * row.size / kSample]);
  const double share = static_cast<double>(k) / static_cast<double>(row.size);
  const double rank = share * kSample, margin = 3 * std::sqrt(rank * (1 - share)) + 1;
  const int64_t high = static_cast<int64_t>(std::max(rank - margin, -1.0));
  const int64_t low = static_cast<int64_t>(rank + margin);
  Bracket b;
  const auto at = [&](int64_t i) {
    return HWY_DYNAMIC_DISPATCH(kth)({sample, kSample}, i + 1, Bracket());
  };
  if (rank >= margin) b.hi = at(high);
  if (low < kSample) b.lo = at(low);
  return b;
}

// k of more than k elements.
Cut find_cut(Passes& passes, const TopkRow& row, int64_t k) {
  // Always: fewer than k keys above b.hi (`above` of them), at least k from b.lo on (`from`).
  Bracket b;
  int64_t above = 0, from = row.size;
  Bracket probe = row.size > 2 * kSample ? guess(row, k) : b;
  bool first = true;
  while (b.lo < b.hi && from - above > kFew) {
    if (!first) {
      const int64_t third = (static_cast<int64_t>(b.hi) - b.lo) / 3;
      probe = {static_cast<int32_t>(b.lo + third), static_cast<int32_t>(b.hi - third)};
      if (third == 0) probe.hi = probe.lo;
    }
    first = false;
    const Counts n = passes.count(probe);
    if (n.above >= k) {
      b.lo = probe.hi + 1;
      from = n.above;
    } else if (n.from < k) {
      b.hi = probe.lo - 1;
      above = n.from;
    } else {
      b = probe;
      above = n.above;
      from = n.from;
    }
  }
  if (b.lo == b.hi) return {b.lo, k - above};
  int32_t keys[kFew + kVector];
  const int64_t n = passes.inside(b, keys);
  const int32_t key = HWY_DYNAMIC_DISPATCH(kth)({keys, static_cast<size_t>(n)}, k - above, b);
  return {key, k - above - std::count_if(keys, keys + n, [&](int32_t x) { return x > key; })};
}

}  // namespace

void topk(const TopkRow& row, std::span<int32_t> ids, bool split) noexcept {
  const int64_t k = static_cast<int64_t>(ids.size());
  if (row.size <= k) {
    for (int64_t i = 0; i < row.size; ++i) ids[i] = row.base + static_cast<int32_t>(i);
    std::fill(ids.begin() + row.size, ids.end(), -1);
    return;
  }
  if (k == 0) return;
  Passes passes(row, split);
  passes.collect(find_cut(passes, row, k), ids);
}

}  // namespace winnow::internal::cpu
#endif  // HWY_ONCE
