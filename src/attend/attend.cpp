// attend: checks the call, chooses the kernel, lays out schedule and workspace.
#include "winnow/attend.h"

#include <algorithm>
#include <limits>

#include "attend/cpu/kernels.h"
#include "attend/kernel.h"
#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "core/own_memory.h"
#include "core/schedule.h"
#include "cpu/threads.h"
#include "model/records.h"
#include "winnow/model.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::attend {

namespace {
[[maybe_unused]] size_t no_workspace(const Shape&, int64_t) { return 0; }

// What a kernel that rounds neither queries nor weights to e4m3 says of a shape.
template <const char* (*kFits)(const Shape&) = nullptr>
const char* full(const Shape& shape) {
  if (shape.precision != Precision::kFull) return "Precision::kFull alone";
  if constexpr (kFits != nullptr) return kFits(shape);
  return nullptr;
}
}  // namespace

std::span<const AttendKernel> kernels() {
#if defined(__x86_64__)
  // Asked for here and not while the table is made, whose lock a child of fork() may find closed.
  const bool on_request = !cpu::bf16_dot_is_fast();
#endif
  static const AttendKernel table[] = {
#ifdef WINNOW_WITH_CUDA
    {{{"sm90/wide+decode", DeviceKind::kCuda, false, internal::cuda::missing},
      full<wide_then_decode_sm90::fits>,
      wide_then_decode_sm90::run,
      wide_sm90::slower},
     decode_sm90::workspace},
    {{{"sm90/wide", DeviceKind::kCuda, false, internal::cuda::missing},
      full<wide_sm90::fits>,
      wide_sm90::run,
      wide_sm90::slower},
     no_workspace},
    {{{"sm90/decode", DeviceKind::kCuda, false, internal::cuda::missing},
      full<decode_sm90::fits>,
      decode_sm90::run},
     decode_sm90::workspace},
    {{{"sm90/fp8", DeviceKind::kCuda, false, internal::cuda::missing},
      decode_sm90::fits_fp8,
      decode_sm90::run},
     decode_sm90::workspace},
#endif
#if defined(__x86_64__)
    {{{"amx", DeviceKind::kCpu, false, cpu::amx_machine}, full, cpu::amx}, cpu::amx_workspace},
    {{{"avx512bf16", DeviceKind::kCpu, on_request, cpu::avx512bf16_machine}, full, cpu::avx512bf16},
     cpu::avx512bf16_workspace},
    {{{"avx512", DeviceKind::kCpu, false, cpu::avx512_machine}, full, cpu::avx512},
     cpu::avx512_workspace},
#endif
    {{{"simd", DeviceKind::kCpu, false, detail::any_machine}, full, cpu::simd},
     cpu::simd_workspace},
    {{{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, reference},
     reference_workspace},
  };
  return table;
}

Params tokens_of(Params p, int32_t first, int32_t count) {
  const auto skip = [first](auto*& at, int64_t stride) {
    if (at) at += first * stride;
  };
  skip(p.q, p.q_token_stride);
  skip(p.q_rope, p.rope_token_stride);
  for (ListView& l : p.lists) {
    skip(l.indices, l.index_stride);
    skip(l.lengths, l.length_stride);
  }
  skip(p.requests, p.request_stride);
  skip(p.out, p.out_token_stride);
  skip(p.out_f32, p.out_token_stride);
  skip(p.lse, p.lse_token_stride);
  skip(p.max_logit, p.max_token_stride);
  p.tokens = count;
  return p;
}

Shape shape_of(const Params& p) {
  const bool two = p.list_count > 1;
  return {.formats = {p.lists[0].format, p.lists[two ? 1 : 0].format},
          .list_count = p.list_count,
          .heads = p.heads,
          .tokens = p.tokens,
          .width = p.lists[0].width + (two ? p.lists[1].width : 0),
          .tables = by_table(p.lists),
          .fixed_split = p.fixed_split,
          .device = p.device.index,
          .workspace = p.workspace.size(),
          .f32_out = p.out_f32 != nullptr,
          .likely_width = p.likely_width,
          .precision = p.precision};
}

namespace {

bool is_fp8(CacheFormat format) { return format == kV32.fp8 || format == kV4.fp8; }

const Model& family(CacheFormat format) {
  return format == kV32.fp8 || format == kV32.bf16 ? kV32 : kV4;
}

// In any part: lengths or a table alone are a list that lacks the rest.
bool given(const KvList& list) {
  return list.cache || list.indices || list.lengths || list.block_table;
}

// The arguments' names: messages are the only strings of a call, and are made when it fails.
struct Names {
  const char *cache, *indices, *columns, *lengths, *block_table;
};
constexpr Names kNames[2] = {{"lists[0].cache", "lists[0].indices", "lists[0].indices (columns)",
                              "lists[0].lengths", "lists[0].block_table"},
                             {"lists[1].cache", "lists[1].indices", "lists[1].indices (columns)",
                              "lists[1].lengths", "lists[1].block_table"}};

Cache checked_cache(const Check& check, const KvList& a, const Names& names, DeviceKind device) {
  const Cache cache = check.cache(a.cache, names.cache, {device, true});
  check.that(!is_index(cache.format), names.cache, "a format that holds latent KV",
             cat(name_of(cache.format)));
  return cache;
}

ListView checked_list(const Check& check, const KvList& a, const Names& names, const Params& p) {
  const Cache cache = checked_cache(check, a, names, p.device.kind);
  const int64_t tokens = p.tokens;
  check.tensor(a.indices, names.indices, DType::kI32, {tokens, Check::kAny});
  check.range(a.indices.shape[1], names.columns, 0, INT32_MAX);
  if (a.lengths) check.strided(a.lengths, names.lengths, DType::kI32, {tokens});
  ListView v;
  v.data = static_cast<const std::byte*>(cache.data);
  v.page_stride = cache.page_stride;
  v.pages = cache.pages;
  v.page = cache.page;
  v.format = cache.format;
  v.indices = static_cast<const int32_t*>(a.indices.data);
  v.index_stride = a.indices.stride[0];
  v.width = static_cast<int32_t>(a.indices.shape[1]);
  v.lengths = static_cast<const int32_t*>(a.lengths.data);
  v.length_stride = a.lengths.stride[0];
  if (check.optional(a.block_table, names.block_table, DType::kI32, {Check::kAny, Check::kAny})) {
    // An empty table has no data; a table of no rows rejects every id all the same.
    static constexpr int32_t kNone = 0;
    v.block_table = a.block_table.data ? static_cast<const int32_t*>(a.block_table.data) : &kNone;
    v.table_stride = a.block_table.stride[0];
    v.table_rows = static_cast<int32_t>(std::min<int64_t>(a.block_table.shape[0], INT32_MAX));
    v.table_width = static_cast<int32_t>(std::min<int64_t>(a.block_table.shape[1], INT32_MAX));
  }
  return v;
}

void check_query(const Check& check, const AttendArgs& a, Params& p) {
  // The cache first: its format says what a query is.
  const Model& model = family(checked_cache(check, a.lists[0], kNames[0], p.device.kind).format);
  const int64_t d = a.q_rope ? model.d_nope : model.d_qk;
  check.tensor(a.q, "q", DType::kBf16, {Check::kAny, Check::kAny, d});
  const int64_t tokens = check.range(a.q.shape[0], "q (tokens)", 0, INT32_MAX - 1);
  const int64_t heads = check.range(a.q.shape[1], "q (heads)", kMinHeads, kMaxHeads);
  p.tokens = static_cast<int32_t>(tokens);
  p.heads = static_cast<int32_t>(heads);
  p.q = static_cast<const bf16*>(a.q.data);
  p.q_token_stride = a.q.stride[0];
  p.q_head_stride = a.q.stride[1];
  if (check.optional(a.q_rope, "q_rope", DType::kBf16, {tokens, heads, model.d_rope})) {
    p.q_rope = static_cast<const bf16*>(a.q_rope.data);
    p.rope_token_stride = a.q_rope.stride[0];
    p.rope_head_stride = a.q_rope.stride[1];
  } else {
    p.q_rope = p.q ? p.q + model.d_nope : nullptr;
    p.rope_token_stride = p.q_token_stride;
    p.rope_head_stride = p.q_head_stride;
  }
}

void check_lists(const Check& check, const AttendArgs& a, Params& p) {
  p.list_count = given(a.lists[1]) ? 2 : 1;
  for (int i = 0; i < p.list_count; ++i) p.lists[i] = checked_list(check, a.lists[i], kNames[i], p);
  if (p.list_count == 2) {
    const CacheFormat f0 = p.lists[0].format, f1 = p.lists[1].format;
    check.that(family(f0).name == family(f1).name, "lists[1].cache",
               cat("a format of ", family(f0).name, ", as lists[0]"), cat(name_of(f1)));
    check.range(int64_t{p.lists[0].width} + p.lists[1].width, "lists (columns)", 0, INT32_MAX);
  }
  if (p.lists[0].block_table || p.lists[1].block_table)
    check.that(static_cast<bool>(a.requests), "requests",
               cat("[", p.tokens, "] int32, which logical ids need"), "nothing");
  if (a.requests) {
    check.strided(a.requests, "requests", DType::kI32, {p.tokens});
    p.requests = static_cast<const int32_t*>(a.requests.data);
    p.request_stride = a.requests.stride[0];
  }
}

void check_results(const Check& check, const AttendArgs& a, Params& p) {
  const int64_t tokens = p.tokens, heads = p.heads;
  if (check.optional(a.sink, "sink", DType::kF32, {heads}))
    p.sink = static_cast<const float*>(a.sink.data);
  // Blocks of heads come in front of the tokens.
  const bool f32 = a.out.dtype == DType::kF32;
  const int blocked = f32 && a.out.rank == 4 ? 1 : 0;
  if (blocked) {
    const int64_t blocks = check.range(a.out.shape[0], "out (blocks of heads)", 1, heads);
    check.that(heads % blocks == 0, "out (blocks of heads)", cat("a divisor of ", heads, " heads"),
               cat(blocks));
    p.block_heads = static_cast<int32_t>(heads / blocks);
    check.output_rows(a.out, "out", DType::kF32, {blocks, tokens, p.block_heads, kValueDim});
    if (a.lse) check.output(a.lse, "lse", DType::kF32, {blocks, tokens, p.block_heads});
    p.out_block_stride = a.out.stride[0];
    p.lse_block_stride = a.lse.stride[0];
  } else {
    check.output_rows(a.out, "out", f32 ? DType::kF32 : DType::kBf16, {tokens, heads, kValueDim});
    if (a.lse) check.output(a.lse, "lse", DType::kF32, {tokens, heads});
  }
  if (f32) p.out_f32 = static_cast<float*>(a.out.data);
  else p.out = static_cast<bf16*>(a.out.data);
  p.out_token_stride = a.out.stride[blocked];
  p.out_head_stride = a.out.stride[blocked + 1];
  p.lse = static_cast<float*>(a.lse.data);
  p.lse_token_stride = a.lse.stride[blocked];
  p.lse_head_stride = a.lse.stride[blocked + 1];
  if (a.max_logit) {
    check.output(a.max_logit, "max_logit", DType::kF32, {tokens, heads});
    p.max_logit = static_cast<float*>(a.max_logit.data);
    p.max_token_stride = a.max_logit.stride[0];
    p.max_head_stride = a.max_logit.stride[1];
  }
  check.apart({{a.out, "out"}, {a.lse, "lse"}, {a.max_logit, "max_logit"}},
              {{a.q, "q"}, {a.q_rope, "q_rope"}, {a.requests, "requests"}, {a.sink, "sink"}});
  for (int i = 0; i < p.list_count; ++i)
    check.apart({{a.out, "out"}, {a.lse, "lse"}, {a.max_logit, "max_logit"}},
                {{a.lists[i].indices, kNames[i].indices},
                 {a.lists[i].lengths, kNames[i].lengths},
                 {a.lists[i].block_table, kNames[i].block_table},
                 {core::pages_view(a.lists[i].cache), kNames[i].cache}});
  p.empty_lse = a.empty_lse_negative ? -std::numeric_limits<float>::infinity()
                                     : std::numeric_limits<float>::infinity();
}

// A call whose arguments are right: parameters, kernel, and the workspace's layout.
class CheckedCall {
 public:
  explicit CheckedCall(const AttendArgs& a) : plan_(a.plan), part_(a.part) {
    p_.device = plan_ ? plan_->device(a.target) : a.target.device;
    check_.that(given(a.lists[0]), "lists[0]", "a list", "none");
    check_query(check_, a, p_);
    check_lists(check_, a, p_);
    check_results(check_, a, p_);
    p_.scale = a.scale;
    p_.precision = checked_precision(a);
    p_.fixed_split = plan_ && plan_->options().split == SplitPolicy::kFixed;
    p_.likely_width = likely_width();
    if (!on_cpu()) {
      check_.rows_of_16(a.q, "q");
      check_.rows_of_16(a.q_rope, "q_rope");
      if (a.out.dtype == DType::kF32) check_rows_of_8(a.out);
      else check_.rows_of_16(a.out, "out");
    }
    p_.workspace = a.workspace;
    shape_ = shape_of(p_);
    if (plan_) check_plan();
    kernel_ = plan_ ? pick<AttendKernel>(plan_->usable(Stage::kAttend), shape_)
                    : &choose("attend", kernels(), shape_, a.target);
    if (!kernel_)
      check_.fail("lists", "what a kernel of the plan can read",
                  cat(name_of(shape_.formats[0]), " and ", name_of(shape_.formats[1])));
  }

  // The kernel's own, behind the schedule of a call that has no plan to bring one.
  size_t workspace_bytes() const {
    const size_t own = kernel_->workspace(shape_, tiles());
    if (!plans_itself()) return own;
    Arena arena;
    carve_schedule(arena);
    arena.take<std::byte>(own);
    return arena.bytes();
  }

  void run(std::span<std::byte> workspace) {
    p_.workspace = workspace;
    if (plan_) p_.schedule = plan_->schedule(part_);
    if (plans_itself()) {
      Arena arena(workspace);
      p_.schedule = make_schedule(schedule_shape(), ends(), carve_schedule(arena));
      const size_t own = kernel_->workspace(shape_, tiles());
      p_.workspace = {arena.take<std::byte>(own), own};
    }
    winnow::run("attend", *kernel_, p_);
  }

  bool on_cpu() const { return p_.device.kind == DeviceKind::kCpu; }
  const Check& check() const { return check_; }

 private:
  Precision checked_precision(const AttendArgs& a) const {
    check_.choice(a.precision, "precision", Precision::kFp8);
    const Precision precision = plan_ ? plan_->options().precision : a.precision;
    check_.that(a.precision == Precision::kFull || a.precision == precision, "precision",
                "kFull or kFp8, as planned", "kFp8 with a plan of kFull");
    for (int i = 0; i < p_.list_count && precision == Precision::kFp8; ++i)
      check_.that(is_fp8(p_.lists[i].format), "precision",
                  "kFull, or fp8 records, which kFp8 multiplies as they are stored",
                  cat("kFp8 with ", name_of(p_.lists[i].format)));
    return precision;
  }

  // Hopper's kernels write fp32 in pairs.
  void check_rows_of_8(const Tensor& out) const {
    bool even = reinterpret_cast<uintptr_t>(out.data) % 8 == 0;
    for (int i = 0; i + 1 < out.rank; ++i) even = even && out.stride[i] % 2 == 0;
    check_.that(even || out.size() == 0, "out", "rows aligned to 8 bytes on CUDA",
                cat("strides ", out.stride[0], ", ", out.stride[1]));
  }

  void check_plan() const {
    const PlanOptions& o = plan_->options();
    const std::span<const Part> parts = plan_->parts();
    check_.range(part_, "part", 0, static_cast<int64_t>(parts.size()) - 1);
    const int32_t tokens = parts[part_].last_token - parts[part_].first_token;
    check_.that(tokens == p_.tokens, "plan",
                cat("a plan whose part ", part_, " has ", p_.tokens, " tokens"),
                cat("one of ", tokens));
    check_.that(o.heads == p_.heads, "plan", cat("a plan for ", p_.heads, " heads"),
                cat("one for ", o.heads));
    // Every token's tiles cover the same positions.
    const Schedule schedule = plan_->schedule(part_);
    const int32_t width = schedule.tiles.empty() ? INT32_MAX : schedule.tiles.back().end;
    check_.that(shape_.width <= width, "lists (columns)", cat("at most ", width, ", as planned"),
                cat(shape_.width));
  }

  // Of a context over ranks, each attends to about its share of a list as wide as all of it.
  int32_t likely_width() const {
    if (!plan_ || plan_->options().parallel.spread != Spread::kContext) return 0;
    const int32_t world = plan_->options().parallel.shard().world;
    return world > 1 ? ceil_div(p_.lists[0].width + p_.lists[1].width, world) : 0;
  }

  ScheduleShape schedule_shape() const {
    return {.tokens = p_.tokens,
            .widths = {p_.lists[0].width, p_.lists[1].width},
            .workers = internal::cpu::threads()};
  }

  // What the balance of the workers rests on: the lengths, where one list has them.
  std::span<const int32_t> ends() const {
    const ListView& list = p_.lists[0];
    if (p_.list_count > 1 || !list.lengths || list.length_stride != 1) return {};
    return {list.lengths, static_cast<size_t>(p_.tokens)};
  }

  bool plans_itself() const { return !plan_ && on_cpu(); }
  int64_t tiles() const {
    if (plan_) return static_cast<int64_t>(plan_->schedule(part_).tiles.size());
    return on_cpu() ? max_tiles(schedule_shape()) : 0;
  }
  ScheduleMemory carve_schedule(Arena& arena) const {
    const auto take = [&]<class T>(T, int64_t n) {
      return std::span<T>(arena.take<T>(n), static_cast<size_t>(n));
    };
    const ScheduleShape s = schedule_shape();
    return {take(Tile(), tiles()), take(int32_t(), s.workers + 1), take(int32_t(), s.tokens + 1)};
  }

  const Check check_{"attend"};
  const Plan* plan_;
  int32_t part_;
  Params p_;
  Shape shape_;
  const AttendKernel* kernel_ = nullptr;
};

}  // namespace
}  // namespace internal::attend

void attend(const AttendArgs& args) try {
  internal::attend::CheckedCall call(args);
  call.check().scale(args.scale);
  const size_t bytes = call.workspace_bytes();
  if (args.workspace.empty() && !args.plan) {
    if (!call.on_cpu()) return call.run({});
    const OwnMemory own("attend", bytes);
    call.run(own.span());
    return;
  }
  call.check().workspace(args.workspace, bytes);
  call.run(args.workspace);
} catch (const std::bad_alloc&) {
  out_of_memory("attend");
}

size_t attend_workspace_bytes(const AttendArgs& args) try {
  return internal::attend::CheckedCall(args).workspace_bytes();
} catch (const std::bad_alloc&) {
  out_of_memory("attend");
}

}  // namespace winnow
