// index_query: checks the call, chooses the kernel.
#include "winnow/index_query.h"

#include <cmath>

#include "core/check.h"
#include "index_query/kernel.h"

namespace winnow {

namespace internal::index_query {

std::span<const IndexQueryKernel> kernels() {
  static constexpr IndexQueryKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

Params checked(const Check& check, const IndexQueryArgs& a) {
  check.tensor(a.q, "q", DType::kBf16, {Check::kAny, Check::kAny, kWidth});
  Params p;
  p.tokens = a.q.shape[0];
  p.heads = a.q.shape[1];
  p.weights_are_bf16 = a.weights.dtype == DType::kBf16;
  check.strided(a.weights, "weights", p.weights_are_bf16 ? DType::kBf16 : DType::kF32,
                {p.tokens, p.heads});
  check.tensor(a.positions, "positions", DType::kI32, {p.tokens});
  p.rope = core::checked_rope(check, a.rope);
  check.that(std::isfinite(a.factor), "factor", "a number", cat(a.factor));
  p.out_is_bf16 = a.out.dtype == DType::kBf16;
  const DType dtype = p.out_is_bf16 ? DType::kBf16 : DType::kE4m3;
  check.output_rows(a.out, "out", dtype, {p.tokens, p.heads, kWidth});
  check.output(a.out_weights, "out_weights", DType::kF32, {p.tokens, p.heads});
  check.apart({{a.out, "out"}, {a.out_weights, "out_weights"}}, {{a.q, "q", &a.out},
                                                                 {a.weights, "weights"},
                                                                 {a.positions, "positions"},
                                                                 {a.rope.table, "rope.table"}});
  p.quantizer = core::quantizer_of(check, CacheFormat::kIndexKeys, a.scale);
  p.q = static_cast<const bf16*>(a.q.data);
  p.q_token = a.q.stride[0];
  p.q_head = a.q.stride[1];
  p.weights = a.weights.data;
  p.weight_token = a.weights.stride[0];
  p.weight_head = a.weights.stride[1];
  p.positions = static_cast<const int32_t*>(a.positions.data);
  p.position_stride = a.positions.stride[0];
  p.hadamard = a.hadamard;
  p.factor = a.factor;
  p.out = a.out.data;
  p.out_token = a.out.stride[0];
  p.out_head = a.out.stride[1];
  p.out_weights = static_cast<float*>(a.out_weights.data);
  p.out_weight_token = a.out_weights.stride[0];
  p.out_weight_head = a.out_weights.stride[1];
  p.device = a.target.device;
  return p;
}

}  // namespace internal::index_query

void index_query(const IndexQueryArgs& args) try {
  using namespace internal::index_query;
  const Params params = checked(Check("index_query"), args);
  run("index_query", choose("index_query", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("index_query");
}

}  // namespace winnow
