// compress: checks the call, chooses the kernel.
#include "winnow/compress.h"

#include "compress/kernel.h"
#include "core/check.h"
#include "winnow/model.h"

namespace winnow {

namespace internal::compress {

std::span<const CompressKernel> kernels() {
  static constexpr CompressKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
  };
  return table;
}

namespace {

// Rows, positions and what an entry takes of them.
void check_rows(const Check& check, const CompressArgs& a, Params& p) {
  check.range(a.ratio, "ratio", 1, a.overlap ? kMaxRows / 2 : kMaxRows);
  check.that(a.gate || (a.ratio == 1 && !a.overlap), "gate", "a gate, or ratio 1 without overlap",
             cat("none at ratio ", a.ratio));
  check.tensor(a.positions, "positions", DType::kI32, {Check::kAny});
  p.tokens = a.positions.shape[0];
  p.rows_are_bf16 = a.rows.dtype == DType::kBf16;
  check.tensor(a.rows, "rows", p.rows_are_bf16 ? DType::kBf16 : DType::kF32,
               {Check::kAny, Check::kAny});
  check.that(a.rows.shape[0] >= p.tokens, "rows",
             cat("at least ", p.tokens, " rows, one for each position"), cat(a.rows.shape[0]));
  const int64_t parts = (a.gate ? 2 : 1) * (a.overlap ? 2 : 1);
  p.width = a.rows.shape[1] / parts;
  // shape_of() allocates, and a pipeline's calls must not: only where the check fails.
  if (p.width < 16 || p.width > kMaxWidth || p.width % 16 != 0 ||
      p.width * parts != a.rows.shape[1])
    check.fail("rows", cat(parts, " x d columns, d a multiple of 16 up to ", kMaxWidth),
               shape_of(a.rows));
  p.rows = a.rows.data;
  p.row_stride = a.rows.stride[0];
  p.positions = static_cast<const int32_t*>(a.positions.data);
  p.position_stride = a.positions.stride[0];
  p.ratio = a.ratio;
  p.overlap = a.overlap;
  p.gate = a.gate;
  if (!a.bias) return;
  if (!a.gate) check.fail("bias", "nothing without a gate", shape_of(a.bias));
  check.tensor(a.bias, "bias", DType::kF32, {a.ratio, values_of(p)});
  p.bias = static_cast<const float*>(a.bias.data);
  p.bias_stride = a.bias.stride[0];
}

void check_state(const Check& check, const CompressArgs& a, Params& p) {
  const int64_t window = rows_of_entry(p);
  if (!a.state.rows) {
    check.that(window == 1, "state.rows", "a state: an entry takes more than one row", "nothing");
    return;
  }
  if (!a.gate) check.fail("state.rows", "nothing without a gate", shape_of(a.state.rows));
  check.output_rows(a.state.rows, "state.rows", DType::kF32,
                    {Check::kAny, Check::kAny, 2 * values_of(p)});
  const int64_t least = a.state.ring && window > 1 ? window - 1 : 1;
  check.range(a.state.rows.shape[1], "state.rows.shape[1]", least, INT32_MAX);
  check.tensor(a.requests, "requests", DType::kI32, {p.tokens});
  p.requests = static_cast<const int32_t*>(a.requests.data);
  p.request_stride = a.requests.stride[0];
  if (a.state.table) {
    check.tensor(a.state.table, "state.table", DType::kI32, {Check::kAny, Check::kAny});
    p.table = static_cast<const int32_t*>(a.state.table.data);
    p.table_stride = a.state.table.stride[0];
    p.table_rows = a.state.table.shape[0];
    p.table_width = a.state.table.shape[1];
  } else {
    check.that(a.state.ring, "state.table", "a block table, or a ring", "neither");
  }
  p.state = static_cast<float*>(a.state.rows.data);
  p.blocks = a.state.rows.shape[0];
  p.block = a.state.rows.shape[1];
  p.block_stride = a.state.rows.stride[0];
  p.state_stride = a.state.rows.stride[1];
  p.ring = a.state.ring;
}

// Where entries go.
void check_outputs(const Check& check, const CompressArgs& a, Params& p) {
  check.that(a.cache || a.latent, "cache", "a cache, or latent", "neither");
  if (a.latent) {
    check.output_rows(a.latent, "latent", DType::kBf16, {p.tokens, p.width});
    p.latent = static_cast<bf16*>(a.latent.data);
    p.latent_stride = a.latent.stride[0];
  }
  if (!a.cache) return;
  const Cache cache = check.cache(a.cache, "cache", {p.device.kind, false});
  check.that(record_dim(cache.format) == p.width, "cache",
             cat("records of ", p.width, " values, as the rows have"), cat(name_of(cache.format)));
  check.tensor(a.slots, "slots", DType::kI64, {p.tokens});
  p.cache = core::pages_of(cache);
  p.quantizer = core::quantizer_of(check, cache.format, a.scale);
  p.slots = static_cast<const int64_t*>(a.slots.data);
  p.slot_stride = a.slots.stride[0];
  if (p.device.kind == DeviceKind::kCpu) core::check_slots(check, a.slots, p.cache);
}

// The cache and the state may share the memory of a pool: which pages are whose, the tables say.
void check_apart(const Check& check, const CompressArgs& a, const Params& p) {
  const bool normed = p.norm.kind != NormKind::kNone;
  const bool stateful = p.state != nullptr;
  const auto apart_with = [&](const Tensor& output, const char* name) {
    check.apart({{output, name}, {a.latent, "latent"}},
                {{a.rows, "rows"},
                 {a.positions, "positions"},
                 {a.bias, "bias"},
                 {Check::read(stateful, a.requests), "requests"},
                 {Check::read(stateful, a.state.table), "state.table"},
                 {Check::read(normed, a.norm.weight), "norm.weight"},
                 {Check::read(normed, a.norm.bias), "norm.bias"},
                 {a.rope.table, "rope.table"},
                 {Check::read(p.slots != nullptr, a.slots), "slots"}});
  };
  apart_with(a.state.rows, "state.rows");
  if (a.cache) apart_with(core::pages_view(a.cache), "cache");
}

Params checked(const CompressArgs& a) {
  const Check check("compress");
  Params p;
  p.device = a.target.device;
  check_rows(check, a, p);
  check_state(check, a, p);
  p.norm = core::checked_norm(check, a.norm, p.width);
  if (a.rope.table) {
    p.rope = core::checked_rope(check, a.rope);
    check.that(p.width >= kRopeDim, "rope", cat("rows of ", kRopeDim, " values or more"),
               cat(p.width));
  }
  p.hadamard = a.hadamard;
  check.that(!a.hadamard || p.width == 128, "hadamard", "rows of 128 values", cat(p.width));
  check_outputs(check, a, p);
  check_apart(check, a, p);
  return p;
}

}  // namespace
}  // namespace internal::compress

void compress(const CompressArgs& args) try {
  using namespace internal::compress;
  const Params params = checked(args);
  run("compress", choose("compress", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("compress");
}

}  // namespace winnow
