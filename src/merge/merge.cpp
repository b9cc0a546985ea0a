// merge: checks the call, chooses the kernel.
#include "winnow/merge.h"
#include "core/check.h"
#include "merge/kernel.h"

namespace winnow {

namespace internal::merge {

std::span<const MergeKernel> kernels() {
  static constexpr MergeKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

namespace {

// f32 or bf16; the dtype to check against.
DType either(const Check& check, const Tensor& t, const char* argument) {
  if (t && t.dtype != DType::kF32 && t.dtype != DType::kBf16)
    check.fail(argument, "f32 or bf16", shape_of(t));
  return t && t.dtype == DType::kBf16 ? DType::kBf16 : DType::kF32;
}

Params checked(const MergeArgs& a) {
  const Check check("merge");
  const DType in = either(check, a.partial_out, "partial_out");
  const DType out = either(check, a.out, "out");
  constexpr int64_t kAny = Check::kAny;
  check.tensor(a.partial_out, "partial_out", in, {kAny, kAny, kAny, kAny});
  const auto [parts, tokens, heads, d_v] = a.partial_out.shape;
  check.strided(a.partial_lse, "partial_lse", DType::kF32, {parts, tokens, heads});
  check.output_rows(a.out, "out", out, {tokens, heads, d_v});
  if (a.lse) check.output(a.lse, "lse", DType::kF32, {tokens, heads});
  check.optional(a.sink, "sink", DType::kF32, {heads});
  check.apart({{a.out, "out"}, {a.lse, "lse"}},
              {{a.partial_out, "partial_out"}, {a.partial_lse, "partial_lse"}, {a.sink, "sink"}});

  Params p;
  p.partial_out = a.partial_out.data;
  p.partial_bf16 = in == DType::kBf16;
  p.part_stride = a.partial_out.stride[0];
  p.token_stride = a.partial_out.stride[1];
  p.head_stride = a.partial_out.stride[2];
  p.partial_lse = static_cast<const float*>(a.partial_lse.data);
  p.lse_part_stride = a.partial_lse.stride[0];
  p.lse_token_stride = a.partial_lse.stride[1];
  p.lse_head_stride = a.partial_lse.stride[2];
  p.parts = parts;
  p.tokens = tokens;
  p.heads = heads;
  p.d_v = d_v;
  p.sink = static_cast<const float*>(a.sink.data);
  p.out = a.out.data;
  p.out_bf16 = out == DType::kBf16;
  p.out_token_stride = a.out.stride[0];
  p.out_head_stride = a.out.stride[1];
  p.lse = static_cast<float*>(a.lse.data);
  p.out_lse_token_stride = a.lse.stride[0];
  p.out_lse_head_stride = a.lse.stride[1];
  p.device = a.target.device;
  return p;
}

}  // namespace
}  // namespace internal::merge

void merge(const MergeArgs& args) try {
  const internal::merge::Params params = internal::merge::checked(args);
  run("merge", choose("merge", internal::merge::kernels(), internal::merge::Shape{}, args.target),
      params);
} catch (const std::bad_alloc&) {
  out_of_memory("merge");
}

}  // namespace winnow
