// join and quantize: check the call, choose the kernel.

#include "core/check.h"
#include "winnow/write.h"
#include "write/kernel.h"

namespace winnow {

namespace internal::write {

std::span<const JoinKernel> join_kernels() {
  static constexpr JoinKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::join},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::join},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::join},
  };
  return table;
}

std::span<const QuantizeKernel> quantize_kernels() {
  static constexpr QuantizeKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90::quantize},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd::quantize},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference::quantize},
  };
  return table;
}

namespace {

View3 view3(const Tensor& t) {
  return {static_cast<bf16*>(t.data), t.stride[0], t.stride[1], t.stride[2], t.shape[2]};
}

// Dense, row-major: what a flat loop over size() elements may walk.
void contiguous(const Check& check, const Tensor& t, const char* argument) {
  int64_t expected = 1;
  for (int i = t.rank - 1; i >= 0 && t.size() > 0; --i) {
    check.that(t.shape[i] == 1 || t.stride[i] == expected, argument, "a contiguous tensor",
               cat("stride ", t.stride[i], " in dimension ", i));
    expected *= t.shape[i];
  }
}

// A tensor of the dtype and of x's own shape.
void same_shape(const Check& check, const Tensor& t, const char* argument, DType dtype,
                const Tensor& x) {
  const auto& s = x.shape;
  switch (x.rank) {
    case 1: return check.tensor(t, argument, dtype, {s[0]});
    case 2: return check.tensor(t, argument, dtype, {s[0], s[1]});
    case 3: return check.tensor(t, argument, dtype, {s[0], s[1], s[2]});
    case 4: return check.tensor(t, argument, dtype, {s[0], s[1], s[2], s[3]});
    default: check.fail("x", "1 to 4 dimensions", std::to_string(x.rank));
  }
}

}  // namespace
}  // namespace internal::write

void join(const JoinArgs& args) try {
  const Check check("join");
  check.strided(args.latent, "latent", DType::kBf16, {Check::kAny, Check::kAny, Check::kAny});
  const int64_t tokens = args.latent.shape[0], heads = args.latent.shape[1];
  check.strided(args.rope, "rope", DType::kBf16, {tokens, heads, Check::kAny});
  check.output(args.out, "out", DType::kBf16,
               {tokens, heads, args.latent.shape[2] + args.rope.shape[2]});
  check.apart({{args.out, "out"}}, {{args.latent, "latent"}, {args.rope, "rope"}});
  const internal::write::JoinParams params{internal::write::view3(args.latent),
                                           internal::write::view3(args.rope),
                                           internal::write::view3(args.out),
                                           tokens,
                                           heads,
                                           args.target.device};
  run("join",
      choose("join", internal::write::join_kernels(), internal::write::Shape{}, args.target),
      params);
} catch (const std::bad_alloc&) {
  out_of_memory("join");
}

void quantize(const QuantizeArgs& args) try {
  const Check check("quantize");
  check.that(static_cast<bool>(args.x), "x", "a tensor", "nothing");
  const bool is_bf16 = args.x.dtype == DType::kBf16;
  check.that(is_bf16 || args.x.dtype == DType::kF32, "x", "bf16 or f32", name_of(args.x.dtype));
  internal::write::same_shape(check, args.x, "x", args.x.dtype, args.x);
  internal::write::contiguous(check, args.x, "x");
  internal::write::same_shape(check, args.out, "out", DType::kE4m3, args.x);
  internal::write::contiguous(check, args.out, "out");
  check.tensor(args.scale, "scale", DType::kF32, {1});
  check.apart({{args.out, "out"}, {args.scale, "scale"}}, {{args.x, "x"}});
  const internal::write::QuantizeParams params{args.x.data,
                                               is_bf16,
                                               args.x.size(),
                                               static_cast<e4m3*>(args.out.data),
                                               static_cast<float*>(args.scale.data),
                                               args.target.device};
  run("quantize",
      choose("quantize", internal::write::quantize_kernels(), internal::write::Shape{},
             args.target),
      params);
} catch (const std::bad_alloc&) {
  out_of_memory("quantize");
}

}  // namespace winnow
