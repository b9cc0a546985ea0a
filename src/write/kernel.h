// What the kernels of write(), gather(), join() and quantize() see: checked, plain, strides in
// elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/formats.h"
#include "core/kernel_table.h"
#include "core/prologue.h"
#include "core/quantizer.h"
#include "model/v32.h"
#include "winnow/write.h"

namespace winnow::internal::write {

struct Shape {};  // every kernel takes every call

struct Params {
  // Values [0, d_nope) of token t at kv + t * kv_stride, the others at rope_part + t * rope_stride.
  const bf16* kv = nullptr;
  const bf16* rope_part = nullptr;
  int64_t kv_stride = 0, rope_stride = 0;
  const int64_t* slots = nullptr;  // below pages * page; negative: skip
  int64_t slot_stride = 0;
  int64_t tokens = 0;
  Pages cache;
  Quantizer quantizer;
  // The prologue; without one rows are stored as they are.
  bool prologue = false;
  NormParams norm;
  int64_t norm_width = 0;
  RopeParams rope;  // no table: none
  const int32_t* positions = nullptr;
  int64_t position_stride = 0;
  bool hadamard = false;
  Device device;
};

inline constexpr int kMaxDim = 576;  // values of the longest record

// How many of a row's values its norm takes: all but V3.2's RoPE part.
constexpr int64_t norm_width(int64_t dim) { return dim < V32::kDqk ? dim : V32::kNope; }

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

// The call of write() as its kernels see it; throws Error if it is wrong.
Params checked(const Check& check, const WriteArgs& a);

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
