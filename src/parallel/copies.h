// Copies of records, one by one: what the CPU's loops and the device's kernels share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/quantizer.h"
#include "model/records.h"
#include "parallel/records.h"

namespace winnow::internal::parallel {

// Bytes of scales that stand apart from their row.
template <class Record>
constexpr int64_t scales_apart() {
  if constexpr (!Record::kQuantized || Record::kFormat == CacheFormat::kV32Fp8) return 0;
  else return Record::kScaleBytes;
}

// Where the scales of a record stand, if apart.
template <class Record>
WINNOW_HD constexpr int64_t scales_at(int64_t off, int64_t page) {
  if constexpr (scales_apart<Record>() > 0) return Record::scales(off, page);
  else return 0;
}

WINNOW_HD inline std::byte* page_at(const Pages& p, int64_t slot) {
  return p.data + slot / p.page * p.stride;
}

// A copy: a record of one cache to one of another. `from` below 0: zeros; `to` below 0: none.
struct Copy {
  int64_t from = -1, to = -1;
};

WINNOW_HD inline Copy copy_of(const Placed& p, int64_t i) {
  const int32_t token = p.order[i];
  if (token < 0) return {};
  const int64_t slot = p.slots ? p.slots[token] : token;
  return slot < p.to.pages * p.to.page ? Copy{i, slot} : Copy{};
}

// One sequence of take_records(): `count` rows of the block from `first` on, `own` of them filled.
struct Taken {
  Pages from, to;
  const int32_t* table = nullptr;  // row of the sequence
  int64_t width = 0, own = 0, first = 0, count = 0;
};
WINNOW_HD inline Copy copy_of(const Taken& p, int64_t i) {
  const int64_t page = i / p.from.page;
  const int64_t found = i < p.own && page < p.width ? p.table[page] : -1;
  const bool there = found >= 0 && found < p.from.pages;
  return {there ? found * p.from.page + i % p.from.page : -1, p.first + i};
}

// One sequence of order_records(): its positions go to rows from `start` on.
struct Ordered {
  Pages from, to;
  Shard shard;
  int64_t first = 0, start = 0, count = 0;
};
WINNOW_HD inline Copy copy_of(const Ordered& p, int64_t i) {
  const int64_t block = int64_t{p.shard.owner(i)} * p.from.page;
  return {block + p.first + p.shard.local(i), p.start + i};
}

#ifdef WINNOW_WITH_CUDA
namespace sm90 {
void copy_records(const Placed& p, const Device& device) noexcept;
void copy_records(const Taken& p, const Device& device) noexcept;
void copy_records(const Ordered& p, const Device& device) noexcept;
void number_places(int64_t* places, int64_t count, const Device& device) noexcept;
}  // namespace sm90
#endif

}  // namespace winnow::internal::parallel
