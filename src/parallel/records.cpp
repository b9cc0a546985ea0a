// Cached records as bytes: copies on the CPU.
#include "parallel/records.h"

#include <algorithm>
#include <cstring>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "model/records.h"
#include "winnow/model.h"

namespace winnow::internal::parallel {

namespace {

constexpr int64_t kEach = 64;  // records of a task

std::byte* page_at(const Pages& p, int64_t slot) {
  return p.data + slot / p.page * p.stride;
}

// Scales that stand apart from their row.
template <class Record>
constexpr int64_t apart() {
  if constexpr (!Record::kQuantized || Record::kFormat == CacheFormat::kV32Fp8) return 0;
  else return Record::kScaleBytes;
}

// Record `a` of one cache to `b` of another; zeros if `a` is negative.
template <class Record>
void copy(const Pages& from, int64_t a, const Pages& to, int64_t b) {
  std::byte* const target = page_at(to, b);
  const int64_t off = b % to.page;
  if (a < 0) {
    std::memset(target + Record::row(off, to.page), 0, Record::kRowBytes);
    if constexpr (apart<Record>() > 0)
      std::memset(target + Record::scales(off, to.page), 0, apart<Record>());
    return;
  }
  const std::byte* const source = page_at(from, a);
  std::memcpy(target + Record::row(off, to.page), source + Record::row(a % from.page, from.page),
              Record::kRowBytes);
  if constexpr (apart<Record>() > 0)
    std::memcpy(target + Record::scales(off, to.page),
                source + Record::scales(a % from.page, from.page), apart<Record>());
}

// f(Record{}, i) for i below `count`, some to a task.
template <class F>
void each_record(CacheFormat format, int64_t count, F&& f) {
  model::with_record(format, [&](auto record) {
    cpu::parallel_for(ceil_div(count, kEach), [&](int64_t task, int) {
      const int64_t last = std::min(count, (task + 1) * kEach);
      for (int64_t i = task * kEach; i < last; ++i) f(record, i);
    });
  });
}

// Of the rank with the most positions.
int64_t longest_share(const Shard& shard, int32_t length) {
  return Shard{shard.world, 0, shard.interleave}.local_length(length);
}

int64_t slot_of(const Sequences& s, const Pages& cache, int64_t r, int64_t local) {
  const int64_t page = local / cache.page;
  if (page >= s.table_width) return -1;
  const int64_t found = s.table[r * s.table_stride + page];
  return found < 0 || found >= cache.pages ? -1 : found * cache.page + local % cache.page;
}

}  // namespace

Cache block_of(CacheFormat format, int64_t count, std::byte* data) {
  return {data, format, 1, static_cast<int32_t>(std::max<int64_t>(count, 1))};
}

void place_records(const Pages& from, const Pages& to, std::span<const int32_t> order,
                   std::span<const int64_t> slots) {
  const int64_t capacity = to.pages * to.page;
  each_record(from.format, static_cast<int64_t>(order.size()), [&](auto record, int64_t i) {
    const int32_t token = order[static_cast<size_t>(i)];
    if (token < 0) return;
    const int64_t slot = slots.empty() ? token : slots[static_cast<size_t>(token)];
    if (slot >= 0 && slot < capacity) copy<decltype(record)>(from, i, to, slot);
  });
}

int64_t block_rows(const Shard& shard, std::span<const int32_t> lengths) {
  int64_t rows = 0;
  for (const int32_t length : lengths) rows += longest_share(shard, length);
  return rows;
}

void take_records(const Pages& cache, const Sequences& s, const Pages& block) {
  int64_t first = 0;
  for (size_t r = 0; r < s.lengths.size(); ++r) {
    const int64_t own = s.shard.local_length(s.lengths[r]);
    each_record(cache.format, longest_share(s.shard, s.lengths[r]), [&](auto record, int64_t i) {
      const int64_t slot = i < own ? slot_of(s, cache, static_cast<int64_t>(r), i) : -1;
      copy<decltype(record)>(cache, slot, block, first + i);
    });
    first += longest_share(s.shard, s.lengths[r]);
  }
}

void order_records(const Pages& blocks, const Sequences& s, std::span<const int32_t> starts,
                   const Pages& to) {
  int64_t first = 0;
  for (size_t r = 0; r < s.lengths.size(); ++r) {
    each_record(blocks.format, s.lengths[r], [&](auto record, int64_t p) {
      const int64_t from = int64_t{s.shard.owner(p)} * blocks.page + first + s.shard.local(p);
      copy<decltype(record)>(blocks, from, to, starts[r] + p);
    });
    first += longest_share(s.shard, s.lengths[r]);
  }
}

}  // namespace winnow::internal::parallel
