// prepare_query: checks the call, chooses the kernel.
#include "winnow/prepare_query.h"

#include "core/check.h"
#include "prepare_query/kernel.h"

namespace winnow {

namespace internal::prepare_query {

std::span<const PrepareQueryKernel> kernels() {
  static constexpr PrepareQueryKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

Params checked(const Check& check, const PrepareQueryArgs& a) {
  check.tensor(a.q, "q", DType::kBf16, {Check::kAny, Check::kAny, Check::kAny});
  Params p;
  p.tokens = a.q.shape[0];
  p.heads = a.q.shape[1];
  p.width = a.q.shape[2];
  check.range(p.width, "q.shape[2]", kRopeDim, INT32_MAX);
  p.norm = core::checked_norm(check, a.norm, p.width);
  check.tensor(a.positions, "positions", DType::kI32, {p.tokens});
  p.rope = core::checked_rope(check, a.rope);
  check.output_rows(a.out, "out", DType::kBf16, {p.tokens, p.heads, p.width});
  const bool normed = a.norm.kind != NormKind::kNone;
  check.apart({{a.out, "out"}}, {{a.q, "q", &a.out},
                                 {a.positions, "positions"},
                                 {a.rope.table, "rope.table"},
                                 {Check::read(normed, a.norm.weight), "norm.weight"},
                                 {Check::read(normed, a.norm.bias), "norm.bias"}});
  p.q = static_cast<const bf16*>(a.q.data);
  p.q_token = a.q.stride[0];
  p.q_head = a.q.stride[1];
  p.out = static_cast<bf16*>(a.out.data);
  p.out_token = a.out.stride[0];
  p.out_head = a.out.stride[1];
  p.positions = static_cast<const int32_t*>(a.positions.data);
  p.position_stride = a.positions.stride[0];
  p.device = a.target.device;
  return p;
}

}  // namespace internal::prepare_query

void prepare_query(const PrepareQueryArgs& args) try {
  using namespace internal::prepare_query;
  const Params params = checked(Check("prepare_query"), args);
  run("prepare_query", choose("prepare_query", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("prepare_query");
}

}  // namespace winnow
