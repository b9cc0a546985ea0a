// What the kernels of write(), gather(), join() and quantize() see: checked, plain, strides in
// elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/formats.h"
#include "core/kernel_table.h"
#include "winnow/write.h"

namespace winnow::internal::write {

struct Shape {};  // every kernel takes every call

// How a tile's scale follows from its largest magnitude: ScaleMode and format, resolved.
struct Quantizer {
  float floor = 0;          // of amax / 448, or of amax itself
  bool floor_amax = false;  // ... if this is set
  bool power_of_two = false;
};

WINNOW_HD inline float scale_of(const Quantizer& q, float amax) {
  const float floored = q.floor_amax && amax < q.floor ? q.floor : amax;
  float s = floored / kE4m3Max;
  if (!q.floor_amax && s < q.floor) s = q.floor;
  return q.power_of_two ? from_ue8m0(static_cast<uint8_t>(ceil_log2(s) + 127)) : s;
}

struct Pages {
  std::byte* data = nullptr;
  int64_t stride = 0;  // bytes
  int64_t pages = 0;
  int32_t page = 1;
  CacheFormat format = CacheFormat::kV32Fp8;
};

struct Params {
  // Values [0, d_nope) of token t at kv + t * kv_stride, the others at rope + t * rope_stride.
  const bf16* kv = nullptr;
  const bf16* rope = nullptr;
  int64_t kv_stride = 0, rope_stride = 0;
  const int64_t* slots = nullptr;  // below pages * page; negative: skip
  int64_t slot_stride = 0;
  int64_t tokens = 0;
  Pages cache;
  Quantizer quantizer;
  Device device;
};

// Writes one scale as the record stores it: fp32, or ue8m0 (s is a power of two then).
WINNOW_HD inline void put_scale(float* to, float s) { *to = s; }
WINNOW_HD inline void put_scale(uint8_t* to, float s) { *to = to_ue8m0(s); }
WINNOW_HD inline float get_scale(const float* from) { return *from; }
WINNOW_HD inline float get_scale(const uint8_t* from) { return from_ue8m0(*from); }

struct GatherParams {
  Pages cache;
  const int32_t* table = nullptr;
  int64_t table_stride = 0, requests = 0, table_width = 0;
  const int32_t* starts = nullptr;  // null: 0
  int64_t start_stride = 0;
  const int32_t* lengths = nullptr;
  int64_t length_stride = 0;
  const int32_t* out_starts = nullptr;  // null: prefix sum of the lengths
  int64_t out_start_stride = 0;
  bf16* out = nullptr;
  int64_t out_stride = 0, rows = 0;
  Device device;
};

// The rows of one request that fall inside out: `count` of them, the first for token `token`.
struct Run {
  int64_t token = 0, row = 0, count = 0;
};

// `before` is the sum of the lengths of the requests before, and takes this one's.
WINNOW_HD inline Run run_of(const GatherParams& p, int64_t request, int64_t& before) {
  const int64_t length = p.lengths[request * p.length_stride];
  Run r{p.starts ? p.starts[request * p.start_stride] : 0,
        p.out_starts ? p.out_starts[request * p.out_start_stride] : before, 0};
  if (length <= 0) return r;
  before += length;
  const int64_t skip = r.row < 0 ? -r.row : 0;  // rows in front of out
  r.token += skip;
  r.row += skip;
  const int64_t left = length - skip, room = p.rows - r.row;
  r.count = left < room ? left : room;
  if (r.count < 0) r.count = 0;
  return r;
}

// The page of a request's token, or null if the table has none or it is outside the cache.
WINNOW_HD inline const std::byte* page_of(const GatherParams& p, int64_t request, int64_t token) {
  if (token < 0 || token / p.cache.page >= p.table_width) return nullptr;
  const int64_t id = p.table[request * p.table_stride + token / p.cache.page];
  if (id < 0 || id >= p.cache.pages) return nullptr;
  return p.cache.data + id * p.cache.stride;
}

// A bf16 tensor [T, H, D] of any strides.
struct View3 {
  bf16* data = nullptr;
  int64_t token_stride = 0, head_stride = 0, stride = 0, width = 0;
};

struct JoinParams {
  View3 latent, rope, out;
  int64_t tokens = 0, heads = 0;
  Device device;
};

struct QuantizeParams {
  const void* x = nullptr;
  bool is_bf16 = false;
  int64_t count = 0;
  e4m3* out = nullptr;
  float* scale = nullptr;
  Device device;
};

using WriteKernel = Kernel<Shape, Params>;
using GatherKernel = Kernel<Shape, GatherParams>;
using JoinKernel = Kernel<Shape, JoinParams>;
using QuantizeKernel = Kernel<Shape, QuantizeParams>;
std::span<const WriteKernel> kernels();
std::span<const GatherKernel> gather_kernels();
std::span<const JoinKernel> join_kernels();
std::span<const QuantizeKernel> quantize_kernels();

namespace reference {
void write(const Params& p) noexcept;
void gather(const GatherParams& p) noexcept;
void join(const JoinParams& p) noexcept;
void quantize(const QuantizeParams& p) noexcept;
}  // namespace reference
namespace simd {
void write(const Params& p) noexcept;
void gather(const GatherParams& p) noexcept;
void join(const JoinParams& p) noexcept;
void quantize(const QuantizeParams& p) noexcept;
}  // namespace simd
namespace sm90 {  // CUDA builds
void write(const Params& p) noexcept;
void gather(const GatherParams& p) noexcept;
void join(const JoinParams& p) noexcept;
void quantize(const QuantizeParams& p) noexcept;
}  // namespace sm90

}  // namespace winnow::internal::write
