// attend_mha: checks the call, chooses the kernel, allocates its scratch.
#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

#include "core/check.h"
#include "core/own_memory.h"
#include "mha/kernel.h"
#include "winnow/mha.h"

namespace winnow {

namespace internal::mha {

std::span<const MhaKernel> kernels() {
  static constexpr MhaKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{{"sm90/dense", DeviceKind::kCuda, false, internal::cuda::missing},
        dense::fits,
        dense::attend,
        dense::slower},
       nullptr},
      {{{"sm90/tiles", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, tiles_sm90},
       nullptr},
#endif
      {{{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd}, simd_workspace},
      {{{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
       reference_workspace},
  };
  return table;
}

Shape shape_of(const Params& p) {
  const auto aligned = [](const bf16* at, int64_t row, int64_t head) {
    return (reinterpret_cast<uintptr_t>(at) % 16 == 0) && row % 8 == 0 && head % 8 == 0;
  };
  return {.tokens = p.tokens,
          .heads = p.heads,
          .rows = p.rows,
          .d_qk = p.d_qk,
          .d_v = p.d_v,
          .topk = p.ids ? p.topk : -1,
          .bias = p.bias != nullptr,
          .aligned = aligned(p.q, p.q_token_stride, p.q_head_stride) &&
                     aligned(p.k, p.k_row_stride, p.k_head_stride) &&
                     aligned(p.v, p.v_row_stride, p.v_head_stride) &&
                     aligned(p.out, p.out_token_stride, p.out_head_stride)};
}

void build_set(const Params& p, int64_t t, uint64_t* bits) noexcept {
  std::memset(bits, 0, words(p.rows) * sizeof(uint64_t));
  const auto add = [&](int64_t id) {
    if (const int64_t row = row_of(p, t, id); row >= 0) bits[row / 64] |= uint64_t{1} << row % 64;
  };
  if (p.ids) {
    for (int64_t i = 0; i < p.topk; ++i) add(p.ids[t * p.id_stride + i]);
    return;
  }
  // Every id: those whose rows exist.
  const int64_t start = start_of(p, t);
  const int64_t first = std::max<int64_t>(-start, 0),
                last = std::min(length_of(p, t), p.rows - start);
  int64_t id = first;
  if (!p.mask && !p.bits && !p.bias) {
    for (; id < last && (start + id) % 64 != 0; ++id) add(id);
    for (; id + 64 <= last; id += 64) bits[(start + id) / 64] = ~uint64_t{0};
  }
  for (; id < last; ++id) add(id);
}

namespace {

void check_ids(const Check& check, const MhaArgs& a, Params& p) {
  if (check.optional(a.ids, "ids", DType::kI32, {p.tokens, Check::kAny})) {
    static constexpr int32_t kNone = 0;  // no columns: an empty set, not "every key"
    p.ids = a.ids.data ? static_cast<const int32_t*>(a.ids.data) : &kNone;
    p.id_stride = a.ids.stride[0];
    p.topk = a.ids.shape[1];
  }
  if (a.starts) {
    check.strided(a.starts, "starts", DType::kI32, {p.tokens});
    p.starts = static_cast<const int32_t*>(a.starts.data);
    p.start_stride = a.starts.stride[0];
  }
  if (a.lengths) {
    check.strided(a.lengths, "lengths", DType::kI32, {p.tokens});
    p.lengths = static_cast<const int32_t*>(a.lengths.data);
    p.length_stride = a.lengths.stride[0];
  }
  if (check.optional(a.mask, "mask", DType::kU8, {p.tokens, Check::kAny})) {
    static constexpr uint8_t kNone = 0;
    p.mask = a.mask.data ? static_cast<const uint8_t*>(a.mask.data) : &kNone;
    p.mask_stride = a.mask.stride[0];
    p.mask_width = a.mask.shape[1];
  }
  if (check.optional(a.bits, "bits", DType::kU8, {p.tokens, Check::kAny})) {
    static constexpr uint8_t kNone = 0;
    p.bits = a.bits.data ? static_cast<const uint8_t*>(a.bits.data) : &kNone;
    p.bits_stride = a.bits.stride[0];
    p.bits_width = a.bits.shape[1];
  }
  if (check.optional(a.bias, "bias", DType::kF32, {p.tokens, Check::kAny})) {
    p.bias = static_cast<const float*>(a.bias.data);
    p.bias_stride = a.bias.stride[0];
    p.bias_width = a.bias.shape[1];
  }
}

Params checked(const MhaArgs& a) {
  const Check check("attend_mha");
  constexpr int64_t kMaxDim = 1 << 16;
  check.tensor(a.q, "q", DType::kBf16, {Check::kAny, Check::kAny, Check::kAny});
  const auto [tokens, heads, d_qk, none] = a.q.shape;
  check.tensor(a.k, "k", DType::kBf16, {Check::kAny, heads, d_qk});
  const int64_t rows = check.range(a.k.shape[0], "k (rows)", 0, INT32_MAX);
  check.tensor(a.v, "v", DType::kBf16, {rows, heads, Check::kAny});
  check.range(d_qk, "q (d_qk)", 1, kMaxDim);
  const int64_t d_v = check.range(a.v.shape[2], "v (d_v)", 1, kMaxDim);
  Params p;
  p.tokens = tokens;
  p.heads = heads;
  p.rows = rows;
  p.d_qk = d_qk;
  p.d_v = d_v;
  p.q = static_cast<const bf16*>(a.q.data);
  p.q_token_stride = a.q.stride[0];
  p.q_head_stride = a.q.stride[1];
  p.k = static_cast<const bf16*>(a.k.data);
  p.k_row_stride = a.k.stride[0];
  p.k_head_stride = a.k.stride[1];
  p.v = static_cast<const bf16*>(a.v.data);
  p.v_row_stride = a.v.stride[0];
  p.v_head_stride = a.v.stride[1];
  check_ids(check, a, p);
  check.scale(a.scale);
  p.scale = a.scale;
  if (check.optional(a.sink, "sink", DType::kF32, {heads}))
    p.sink = static_cast<const float*>(a.sink.data);
  check.output_rows(a.out, "out", DType::kBf16, {tokens, heads, d_v});
  p.out = static_cast<bf16*>(a.out.data);
  p.out_token_stride = a.out.stride[0];
  p.out_head_stride = a.out.stride[1];
  if (a.lse) {
    check.output(a.lse, "lse", DType::kF32, {tokens, heads});
    p.lse = static_cast<float*>(a.lse.data);
    p.lse_token_stride = a.lse.stride[0];
    p.lse_head_stride = a.lse.stride[1];
  }
  check.apart({{a.out, "out"}, {a.lse, "lse"}}, {{a.q, "q"},
                                                 {a.k, "k"},
                                                 {a.v, "v"},
                                                 {a.ids, "ids"},
                                                 {a.starts, "starts"},
                                                 {a.lengths, "lengths"},
                                                 {a.mask, "mask"},
                                                 {a.bits, "bits"},
                                                 {a.bias, "bias"},
                                                 {a.sink, "sink"}});
  constexpr float kInf = std::numeric_limits<float>::infinity();
  p.empty_lse = a.empty_lse_negative ? -kInf : kInf;
  p.device = a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::mha

void attend_mha(const MhaArgs& args) try {
  internal::mha::Params p = internal::mha::checked(args);
  const internal::mha::Shape shape = internal::mha::shape_of(p);
  const internal::mha::MhaKernel& kernel =
      choose("mha", internal::mha::kernels(), shape, args.target);
  if (p.tokens == 0 || p.heads == 0) return;
  std::optional<OwnMemory> own;  // of a CPU kernel
  if (kernel.workspace) p.workspace = own.emplace("attend_mha", kernel.workspace(shape)).span();
  run("attend_mha", kernel, p);
} catch (const std::bad_alloc&) {
  out_of_memory("attend_mha");
}

}  // namespace winnow
