// Cached records as bytes: on the CPU copies of memory, on CUDA the kernels of records_sm90.cu.
#include "parallel/records.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "cuda/device.h"
#include "parallel/copies.h"
#include "winnow/model.h"

namespace winnow::internal::parallel {

namespace {

constexpr int64_t kEach = 64;  // records of a task

template <class Record>
void copy(const Pages& from, const Pages& to, const Copy& c) {
  std::byte* const target = page_at(to, c.to);
  const int64_t off = c.to % to.page;
  std::byte* const row = target + Record::row(off, to.page);
  std::byte* const scales = target + scales_at<Record>(off, to.page);
  if (c.from < 0) {
    std::memset(row, 0, Record::kRowBytes);
    std::memset(scales, 0, scales_apart<Record>());
    return;
  }
  const std::byte* const source = page_at(from, c.from);
  const int64_t at = c.from % from.page;
  std::memcpy(row, source + Record::row(at, from.page), Record::kRowBytes);
  std::memcpy(scales, source + scales_at<Record>(at, from.page), scales_apart<Record>());
}

// All copies of a kind.
template <class Copies>
void copy_all(const Copies& p, [[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    const cuda::Current current(device);
    sm90::copy_records(p, device);
    return cuda::check_launch("pipeline");
  }
#endif
  model::with_record(p.from.format, [&](auto record) {
    cpu::parallel_for(ceil_div(p.count, kEach), [&](int64_t task, int) {
      const int64_t last = std::min(p.count, (task + 1) * kEach);
      for (int64_t i = task * kEach; i < last; ++i)
        if (const Copy c = copy_of(p, i); c.to >= 0) copy<decltype(record)>(p.from, p.to, c);
    });
  });
}

// Of the rank with the most positions.
int64_t longest_share(const Shard& shard, int32_t length) {
  return Shard{shard.world, 0, shard.interleave}.local_length(length);
}

}  // namespace

Cache block_of(CacheFormat format, int64_t count, std::byte* data) {
  return {data, format, 1, static_cast<int32_t>(std::max<int64_t>(count, 1))};
}

void place_records(const Placed& p, const Device& device) { copy_all(p, device); }

void number_places(int64_t* places, int64_t count, [[maybe_unused]] const Device& device) {
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    const cuda::Current current(device);
    sm90::number_places(places, count, device);
    return cuda::check_launch("pipeline");
  }
#endif
  std::iota(places, places + count, int64_t{0});
}

int64_t block_rows(const Shard& shard, std::span<const int32_t> lengths) {
  int64_t rows = 0;
  for (const int32_t length : lengths) rows += longest_share(shard, length);
  return rows;
}

void take_records(const Pages& cache, const Sequences& s, const Pages& block,
                  const Device& device) {
  int64_t first = 0;
  for (size_t r = 0; r < s.lengths.size(); ++r) {
    const int64_t count = longest_share(s.shard, s.lengths[r]);
    if (count > 0)
      copy_all(Taken{.from = cache,
                     .to = block,
                     .table = s.table + static_cast<int64_t>(r) * s.table_stride,
                     .width = s.table_width,
                     .own = s.shard.local_length(s.lengths[r]),
                     .first = first,
                     .count = count},
               device);
    first += count;
  }
}

void order_records(const Pages& blocks, const Sequences& s, std::span<const int32_t> starts,
                   const Pages& to, const Device& device) {
  int64_t first = 0;
  for (size_t r = 0; r < s.lengths.size(); ++r) {
    if (s.lengths[r] > 0)
      copy_all(Ordered{.from = blocks,
                       .to = to,
                       .shard = s.shard,
                       .first = first,
                       .start = starts[r],
                       .count = s.lengths[r]},
               device);
    first += longest_share(s.shard, s.lengths[r]);
  }
}

}  // namespace winnow::internal::parallel
