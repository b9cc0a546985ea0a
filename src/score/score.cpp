// score and score_select: check the call, choose the kernel.
#include "winnow/score.h"

#include <algorithm>
#include <optional>

#include "core/blocks.h"
#include "core/check.h"
#include "core/own_memory.h"
#include "cpu/isa.h"
#include "score/kernel.h"
#include "winnow/model.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::score {

namespace {

[[maybe_unused]] const char* needs_e4m3(const Shape& s) {
  return s.is_bf16 ? "reads index keys in e4m3" : nullptr;
}
#ifdef WINNOW_WITH_CUDA
const char* needs_bf16(const Shape& s) { return s.is_bf16 ? nullptr : "reads index keys in bf16"; }
const char* needs_tiles(const Shape& s) {
  if (s.is_bf16) return needs_e4m3(s);
  return s.whole_tiles ? nullptr : "tiles of 64 keys do not lie whole and aligned in pages";
}
#endif

#if defined(__x86_64__)
std::string lacks_avx512bf16() {
  const internal::cpu::Isa& cpu = internal::cpu::isa();
  return cpu.avx512_bf16 && cpu.avx512_vbmi ? "" : "this CPU has no AVX-512 BF16 and VBMI";
}
std::string lacks_amx() {
  const internal::cpu::Isa& cpu = internal::cpu::isa();
#ifdef WINNOW_EMULATE_AMX  // a test may run the kernel's logic without the unit
  return cpu.avx512_bf16 && cpu.avx512_vbmi ? "" : "this CPU has no AVX-512 BF16 and VBMI";
#else
  return cpu.amx_bf16 && cpu.avx512_vbmi ? "" : "this CPU has no AMX";
#endif
}
#endif

}  // namespace

std::span<const ScoreKernel> kernels() {
#if defined(__x86_64__)
  // Asked for here and not while the table is made, whose lock a child of fork() may find closed.
  const bool on_request = internal::cpu::isa().intel;
#endif
  static const ScoreKernel table[] = {
#ifdef WINNOW_WITH_CUDA
    {{{"sm90/bulk", DeviceKind::kCuda, false, internal::cuda::missing}, needs_tiles, bulk_sm90},
     sm90_workspace,
     select_sm90},
    {{{"sm90/loads", DeviceKind::kCuda, false, internal::cuda::missing}, needs_e4m3, loads_sm90},
     sm90_workspace,
     select_sm90},
    {{{"sm90/bf16", DeviceKind::kCuda, false, internal::cuda::missing}, needs_bf16, bf16_sm90},
     sm90_workspace,
     select_sm90},
#endif
#if defined(__x86_64__)
    {{{"amx", DeviceKind::kCpu, false, lacks_amx}, needs_e4m3, amx}, waves_workspace, in_waves},
    // Intel's AMX generations run VDPBF16PS slower than FMA: there it serves on request only.
    {{{"avx512bf16", DeviceKind::kCpu, on_request, lacks_avx512bf16}, needs_e4m3, avx512bf16},
     waves_workspace,
     in_waves},
#endif
    {{{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, simd},
     waves_workspace,
     in_waves},
    {{{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
     waves_workspace,
     in_waves},
  };
  return table;
}

int64_t planned_keys(const PlanOptions& o) {
  const bool gathered = o.parallel.spread == Spread::kQueries && o.parallel.sharded;
  return std::max<int64_t>(o.max_context / o.ratio, gathered ? o.workspace_rows : 0);
}

namespace {

// Keys of a row that the call can name: of score_select(), which has no logits to bound them.
int64_t key_limit(const ScoreArgs& a) {
  if (!a.block_table) return a.key_rows.shape[0];
  int64_t keys = 0;
  const bool overflow = __builtin_mul_overflow(a.block_table.shape[1], a.keys.page, &keys);
  return overflow ? INT32_MAX : std::clamp<int64_t>(keys, 0, INT32_MAX);
}

void check_keys(const Check& check, const ScoreArgs& a, Params& p) {
  check.that(!(a.keys && a.key_rows), "keys", "either a cache or key_rows", "both");
  if (a.key_rows) {
    check.tensor(a.key_rows, "key_rows", a.q.dtype, {Check::kAny, kIndexDim});
    check.range(a.key_rows.shape[0], "key_rows rows", 0, INT32_MAX);
    if (p.is_bf16)
      check.that(!a.key_scales, "key_scales", "none with keys in bf16", shape_of(a.key_scales));
    else check.tensor(a.key_scales, "key_scales", DType::kF32, {a.key_rows.shape[0]});
    check.that(!a.block_table, "block_table", "none with key_rows", shape_of(a.block_table));
    check.that(!a.requests, "requests", "none with key_rows", shape_of(a.requests));
    p.rows = static_cast<const uint8_t*>(a.key_rows.data);
    p.row_stride = a.key_rows.stride[0] * size_of(a.key_rows.dtype);
    p.scales = static_cast<const float*>(a.key_scales.data);
    p.scale_stride = a.key_scales.stride[0];
    return;
  }
  const Cache c = check.cache(a.keys, "keys", {p.device.kind, false});
  const CacheFormat format = p.is_bf16 ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys;
  check.that(c.format == format, "keys",
             cat("a cache of ", name_of(format), ", as q is ", p.is_bf16 ? "bf16" : "e4m3"),
             cat(name_of(c.format)));
  check.tensor(a.block_table, "block_table", DType::kI32, {Check::kAny, Check::kAny});
  check.tensor(a.requests, "requests", DType::kI32, {p.tokens});
  check.that(!a.key_scales, "key_scales", "none with a cache", shape_of(a.key_scales));
  p.cache = static_cast<const std::byte*>(c.data);
  p.page_stride = c.page_stride;
  p.pages = c.pages;
  p.page = c.page;
  p.table = static_cast<const int32_t*>(a.block_table.data);
  p.table_stride = a.block_table.stride[0];
  p.table_rows = a.block_table.shape[0];
  p.table_width = a.block_table.shape[1];
  static constexpr int32_t kNoToken = 0;  // paged keys show by `requests`, with no tokens too
  p.requests = p.tokens > 0 ? static_cast<const int32_t*>(a.requests.data) : &kNoToken;
  p.request_stride = a.requests.stride[0];
}

// Everything but the logits.
Params checked(const Check& check, const ScoreArgs& a) {
  Params p;
  p.is_bf16 = a.q.dtype == DType::kBf16;
  check.tensor(a.q, "q", p.is_bf16 ? DType::kBf16 : DType::kE4m3,
               {Check::kAny, Check::kAny, kIndexDim});
  p.device = a.plan ? a.plan->device(a.target) : a.target.device;
  p.tokens = a.q.shape[0];
  p.heads = static_cast<int32_t>(check.range(a.q.shape[1], "q heads", kMinHeads, kMaxHeads));
  check.tensor(a.weights, "weights", DType::kF32, {p.tokens, p.heads});
  check_keys(check, a, p);
  check.optional(a.starts, "starts", DType::kI32, {p.tokens});
  check.tensor(a.ends, "ends", DType::kI32, {p.tokens});
  if (a.plan) {
    check.that(a.some_tokens ? p.tokens <= a.plan->tokens() : a.plan->tokens() == p.tokens, "plan",
               cat("a plan refilled for ", p.tokens, " tokens"), cat("one for ", a.plan->tokens()));
    check.that(a.plan->options().index_heads == p.heads, "plan",
               cat("a plan for ", p.heads, " index heads"),
               cat("one for ", a.plan->options().index_heads));
  }
  p.q = static_cast<const uint8_t*>(a.q.data);
  p.q_token_stride = a.q.stride[0] * size_of(a.q.dtype);
  p.q_head_stride = a.q.stride[1] * size_of(a.q.dtype);
  p.weights = static_cast<const float*>(a.weights.data);
  p.weight_stride = a.weights.stride[0];
  p.ranges = {static_cast<const int32_t*>(a.starts.data), a.starts.stride[0],
              static_cast<const int32_t*>(a.ends.data), a.ends.stride[0], key_limit(a)};
  return p;
}

void check_apart(const Check& check, const ScoreArgs& a,
                 std::initializer_list<Check::Named> outputs) {
  check.apart(outputs, {{a.q, "q"},
                        {a.weights, "weights"},
                        {core::pages_view(a.keys), "keys"},
                        {a.block_table, "block_table"},
                        {a.requests, "requests"},
                        {a.key_rows, "key_rows"},
                        {a.key_scales, "key_scales"},
                        {a.starts, "starts"},
                        {a.ends, "ends"}});
}

const ScoreKernel& kernel_for(const char* stage, const ScoreArgs& a, const Shape& shape) {
  if (!a.plan) return choose(stage, kernels(), shape, a.target);
  if (const auto* planned = pick<ScoreKernel>(a.plan->usable(Stage::kScore), shape))
    return *planned;
  // None that the plan may use reads these keys: say why.
  return choose(stage, kernels(), shape, a.plan->options().target);
}

Shape shape_for(const Params& p, int64_t topk) {
  return {.heads = p.heads,
          .tokens = p.tokens,
          .keys = p.ranges.limit,
          .topk = static_cast<int32_t>(std::min<int64_t>(topk, INT32_MAX)),
          .whole_tiles = whole_tiles(p),
          .is_bf16 = p.is_bf16};
}

}  // namespace
}  // namespace internal::score

void score(const ScoreArgs& args) try {
  const Check check("score");
  internal::score::Params p = internal::score::checked(check, args);
  // Contiguous keys have a column each; paged ones are bounded by the columns given.
  const int64_t columns = args.key_rows ? args.key_rows.shape[0] : Check::kAny;
  check.output_rows(args.logits, "logits", DType::kF32, {p.tokens, columns});
  internal::score::check_apart(check, args, {{args.logits, "logits"}});
  p.ranges.limit = check.range(args.logits.shape[1], "logits columns", 0, INT32_MAX);
  p.logits = static_cast<float*>(args.logits.data);
  p.logit_stride = args.logits.stride[0];
  p.clean = args.clean;
  run("score", internal::score::kernel_for("score", args, internal::score::shape_for(p, 0)), p);
} catch (const std::bad_alloc&) {
  out_of_memory("score");
}

void score_select(const ScoreSelectArgs& args) try {
  const Check check("score_select");
  internal::score::SelectParams p;
  p.score = internal::score::checked(check, args.score);
  check.that(!args.score.logits, "logits", "none", shape_of(args.score.logits));
  check.output_rows(args.ids, "ids", DType::kI32, {p.score.tokens, Check::kAny});
  p.ids = static_cast<int32_t*>(args.ids.data);
  p.id_stride = args.ids.stride[0];
  p.width = args.ids.shape[1];
  if (args.values)
    check.output_rows(args.values, "values", DType::kF32, {p.score.tokens, args.ids.shape[1]});
  p.values = static_cast<float*>(args.values.data);
  p.value_stride = args.values.stride[0];
  p.relative = args.relative;
  p.blocks = checked_blocks(check, args.blocks, p.score.tokens);
  internal::score::check_apart(
      check, args.score,
      {{args.ids, "ids"}, {args.values, "values"}, {args.blocks.best, "blocks.best"}});
  check.apart({{args.ids, "ids"}, {args.values, "values"}, {args.blocks.best, "blocks.best"}},
              {{args.blocks.within, "blocks.within"}});
  if (args.score.plan && p.score.device.kind == DeviceKind::kCuda)
    p.score.ranges.limit =
        std::min(p.score.ranges.limit, internal::score::planned_keys(args.score.plan->options()));
  internal::score::Shape shape = internal::score::shape_for(p.score, p.width);
  shape.blocks = p.blocks.given();
  const auto& kernel = internal::score::kernel_for("score_select", args.score, shape);

  std::optional<OwnMemory> own;
  p.workspace = args.workspace;
  size_t least = 0;
  if (p.score.device.kind == DeviceKind::kCpu) {
    // The longest range, not the table's width, decides what a call on the CPU needs.
    const int64_t keys = internal::score::longest_range(p.score);
    least = internal::score::smallest_workspace(keys);
    if (!args.score.plan && args.workspace.empty()) {
      own.emplace(
          "score_select",
          kernel.workspace(
              {.heads = shape.heads, .tokens = shape.tokens, .keys = keys, .topk = shape.topk}));
      p.workspace = own->span();
    }
  } else {
    // Lengths are on the device; the plan's capacity, or the table, bounds them.
    least = internal::score::smallest_workspace(std::max<int64_t>(p.score.ranges.limit, 1));
  }
  check.workspace(p.workspace, least);
  launch("score_select", kernel, p.score.device, [&] { kernel.run_select(kernel, p); });
} catch (const std::bad_alloc&) {
  out_of_memory("score_select");
}

size_t score_select_workspace_bytes(const ScoreSelectArgs& args) try {
  const Check check("score_select");
  const internal::score::Params p = internal::score::checked(check, args.score);
  internal::score::Shape shape = internal::score::shape_for(p, args.ids.shape[1]);
  shape.blocks = args.blocks.within || args.blocks.best;
  return internal::score::kernel_for("score_select", args.score, shape).workspace(shape);
} catch (const std::bad_alloc&) {
  out_of_memory("score_select");
}

}  // namespace winnow
