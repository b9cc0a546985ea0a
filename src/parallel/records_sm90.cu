// Records as bytes on the device: a warp copies a record, 4 bytes a lane, so that any page size and
// block is aligned enough. Memory-bound: a record is read and written once.
#include <cuda_runtime.h>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "parallel/copies.h"

namespace winnow::internal::parallel::sm90 {

namespace {

constexpr int kThreads = 256, kLanes = 32;

// `bytes` from one place to another, or zeros.
__device__ void copy_words(std::byte* to, const std::byte* from, int64_t bytes, int lane) {
  const auto* const source = reinterpret_cast<const uint32_t*>(from);
  auto* const target = reinterpret_cast<uint32_t*>(to);
  for (int i = lane; i < static_cast<int>(bytes / 4); i += kLanes) target[i] = from ? source[i] : 0;
}

template <class Record, class Copies>
__global__ void __launch_bounds__(kThreads) copies(const __grid_constant__ Copies p) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kLanes;
  if (i >= p.count) return;
  const Copy c = copy_of(p, i);
  if (c.to < 0) return;
  std::byte* const page = page_at(p.to, c.to);
  const int64_t off = c.to % p.to.page;
  const std::byte* row = nullptr;
  const std::byte* scales = nullptr;
  if (c.from >= 0) {
    const std::byte* const source = page_at(p.from, c.from);
    const int64_t at = c.from % p.from.page;
    row = source + Record::row(at, p.from.page);
    scales = source + scales_at<Record>(at, p.from.page);
  }
  copy_words(page + Record::row(off, p.to.page), row, Record::kRowBytes, lane);
  if constexpr (scales_apart<Record>() > 0)
    copy_words(page + scales_at<Record>(off, p.to.page), scales, scales_apart<Record>(), lane);
}

__global__ void __launch_bounds__(kThreads) numbers(int64_t* places, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < count) places[i] = i;
}

template <class Copies>
void launch(const Copies& p, const Device& device) noexcept {
  if (p.count == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(p.count * kLanes, kThreads));
  model::with_record(p.from.format, [&](auto record) {
    copies<decltype(record)><<<blocks, kThreads, 0, cuda::stream_of(device)>>>(p);
  });
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

void copy_records(const Placed& p, const Device& device) noexcept { launch(p, device); }
void copy_records(const Taken& p, const Device& device) noexcept { launch(p, device); }
void copy_records(const Ordered& p, const Device& device) noexcept { launch(p, device); }

void number_places(int64_t* places, int64_t count, const Device& device) noexcept {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(ceil_div<int64_t>(count, kThreads));
  numbers<<<blocks, kThreads, 0, cuda::stream_of(device)>>>(places, count);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::parallel::sm90
