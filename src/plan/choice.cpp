// Resolves a plan's options and asks every stage's table for a kernel. Beside support and pipeline,
// the one place that sees all stages.
#include "plan/choice.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include "attend/kernel.h"
#include "core/arena.h"
#include "core/arithmetic.h"
#include "core/check.h"
#include "core/tuning_h200.h"
#include "cpu/threads.h"
#include "lists/kernel.h"
#include "locate/kernel.h"
#include "plan/batch.h"
#include "plan/ranks.h"
#include "plan/share.h"
#include "score/kernel.h"
#include "select/kernel.h"
#include "write/kernel.h"

namespace winnow::internal::plan {

namespace {

namespace tuned = tuning_h200::route;

constexpr int64_t kMaxCapacity = 1 << 24;  // requests and tokens, far above any batch

Mode resolve_mode(const PlanOptions& o, const Check& check) {
  const bool quantized = o.format == o.model.fp8;
  if (o.mode == Mode::kAuto) {
    if (!quantized) return Mode::kBf16;
    if (chooses_routes(o)) return Mode::kSeparate;
    if (o.heads < 32) return Mode::kMixed;
    return Mode::kDirect;  // as quick as reading a gathered copy, which would be made first
  }
  check.that((o.mode == Mode::kBf16) != quantized, "mode",
             quantized ? "kMixed, kSeparate or kDirect for an fp8 cache" : "kBf16 for a bf16 cache",
             quantized ? "kBf16" : "a mode of fp8 caches");
  return o.mode;
}

// Tokens that the cache holds. That of a rank may hold its shard of every sequence.
int64_t held_tokens(const PlanOptions& o) {
  return o.pages * o.page * (holds_shard(o.parallel) ? o.parallel.comm->size() : 1);
}

int64_t default_rows(const PlanOptions& o) {
  const V4ChunkArgs v4{.ratio = o.extra_topk > 0 ? o.ratio : 0,
                       .window = o.topk,
                       .max_model_len = o.max_context,
                       .max_batched_tokens = o.max_tokens};
  if (o.model.lists == 2) return std::min<int64_t>(v4_chunk_rows(v4), INT32_MAX);
  // A chunk has one sequence at least, and no more than the cache holds unless prefixes are shared.
  const int64_t rows = int64_t{5} * o.max_context;
  const int64_t enough = std::max<int64_t>(o.max_context, held_tokens(o));
  return std::min<int64_t>(o.pages > 0 ? std::min(rows, enough) : rows, INT32_MAX);
}

// The shapes of the stages' calls for `tokens` tokens.
score::Shape score_shape(const PlanOptions& o, int64_t tokens) {
  const int32_t picked = o.model.lists == 2 ? o.extra_topk : o.topk;  // by the indexer
  return {.heads = o.index_heads,
          .tokens = tokens,
          .keys = score::planned_keys(o),
          .topk = picked,
          .whole_tiles = o.page % score::kTileKeys == 0};
}
select::Shape select_shape(const PlanOptions& o, int64_t tokens) {
  const score::Shape s = score_shape(o, tokens);
  return {.tokens = tokens, .columns = s.keys, .topk = s.topk, .device = o.target.device.index};
}
attend::Shape attend_shape(const PlanOptions& o, bool gathered, int64_t tokens, size_t workspace) {
  const ScheduleShape s = schedule_shape(o, gathered, tokens);
  const CacheFormat format = gathered ? o.model.bf16 : o.format;
  return {.formats = {format, format},
          .list_count = !gathered && o.extra_topk > 0 ? 2 : 1,
          .heads = o.heads,
          .tokens = tokens,
          .width = s.widths[0] + s.widths[1],
          .fixed_split = o.split == SplitPolicy::kFixed,
          .device = o.target.device.index,
          .workspace = workspace,
          .precision = o.precision};
}

// Fills a Choice stage by stage.
struct Chooser {
  Target target;
  Choice choice;
  bool known = false;  // some stage has the kernel requested

  // Chooses for each of `shapes`, so that a shape that no kernel serves is an error now, and keeps
  // the rows that a batch may need. A name requested binds the stages that have it, as
  // WINNOW_KERNEL does. Returns the rows.
  template <class K>
  std::vector<const K*> pick(Stage stage, const char* name, std::span<const K> table,
                             std::initializer_list<typename K::Shape> shapes) {
    Target bound = target;
    bound.kernel = nullptr;
    for (const K& k : table)
      if (target.kernel && detail::means(target.kernel, k.name) && k.device == target.device.kind)
        bound.kernel = target.kernel;
    known |= bound.kernel != nullptr;
    const auto s = static_cast<size_t>(stage);
    for (const auto& shape : shapes) choose(name, table, shape, bound, &choice.reasons[s]);
    std::vector<const K*> rows;
    Usable& usable = choice.usable[s];
    usable = usable_rows(name, table, bound);
    rows.reserve(usable.rows.size());
    for (const detail::KernelEntry* row : usable.rows) rows.push_back(static_cast<const K*>(row));
    return rows;
  }
};

}  // namespace

bool chooses_routes(const PlanOptions& o) noexcept {
  if (o.mode != Mode::kAuto || o.format != o.model.fp8) return false;
  // Gathered rows are bf16.
  if (o.precision == Precision::kFp8) return false;
  // A token's bits may not depend on its batch: not on how many tokens come with it, nor (V4) on
  // the requests before it.
  if (o.split == SplitPolicy::kFixed) return false;
  // A rank that holds a part of the context has no whole sequence in its pages to gather.
  if (holds_shard(o.parallel)) return false;
  const bool cuda = o.target.device.kind == DeviceKind::kCuda;
  const int32_t from = o.model.lists == 2 ? tuned::kV4RoutedHeads : tuned::kNear64Heads;
  return o.mha || (cuda && o.heads >= from) || o.route != prefill_route;
}

// Kernels are made for the known families: their sizes and formats cannot be mixed. Top-k and
// window are the caller's to change.
void check_model(const Check& check, const Model& m) {
  const Model* known = m.name == kV32.name ? &kV32 : m.name == kV4.name ? &kV4 : nullptr;
  check.that(known != nullptr, "model", "v32 or v4", cat("'", m.name, "'"));
  check.that(m.d_qk == known->d_qk, "model.d_qk", cat(known->d_qk), cat(m.d_qk));
  check.that(m.d_v == known->d_v, "model.d_v", cat(known->d_v), cat(m.d_v));
  check.that(m.d_nope == known->d_nope, "model.d_nope", cat(known->d_nope), cat(m.d_nope));
  check.that(m.d_rope == known->d_rope, "model.d_rope", cat(known->d_rope), cat(m.d_rope));
  check.that(m.fp8 == known->fp8, "model.fp8", cat(name_of(known->fp8)), cat(name_of(m.fp8)));
  check.that(m.bf16 == known->bf16, "model.bf16", cat(name_of(known->bf16)), cat(name_of(m.bf16)));
  check.that(m.lists == known->lists, "model.lists", cat(known->lists), cat(m.lists));
}

PlanOptions resolve(PlanOptions o) {
  const Check check("plan");
  check_model(check, o.model);
  o.model.name = model_of(o.model.name).name;  // the caller's text may end before the plan
  check.choice(o.mode, "mode", Mode::kDirect);
  check.choice(o.split, "split", SplitPolicy::kFixed);
  check.choice(o.precision, "precision", Precision::kFp8);
  check.choice(o.target.device.kind, "target.device.kind", DeviceKind::kCuda);
  check.that(o.format == o.model.fp8 || o.format == o.model.bf16, "format",
             cat(name_of(o.model.fp8), " or ", name_of(o.model.bf16), " for model ", o.model.name),
             std::string(name_of(o.format)));
  const bool v4 = o.model.lists == 2;
  check.range(o.heads, "heads", kMinHeads, kMaxHeads);
  check.range(o.index_heads, "index_heads", 1, 128);
  if (o.topk == 0) o.topk = v4 ? o.model.window : o.model.default_topk;
  check.range(o.topk, "topk", 1, INT32_MAX / 4);
  check.range(o.extra_topk, "extra_topk", 0, v4 ? INT32_MAX / 4 : 0);
  if (o.ratio == 0) o.ratio = v4 ? 4 : 1;
  check.range(o.ratio, "ratio", 1, v4 ? INT32_MAX : 1);
  check.range(o.page, "page", 1, INT32_MAX);
  check.range(o.pages, "pages", 0, INT32_MAX / o.page);  // slots are int32
  check.range(o.max_requests, "max_requests", 1, kMaxCapacity);
  check.range(o.max_tokens, "max_tokens", 1, kMaxCapacity);
  check.that(o.pages > 0 || o.max_context != 0, "pages", "1 or more, or a max_context", "0");
  if (o.max_context == 0)
    o.max_context = static_cast<int32_t>(std::min<int64_t>(held_tokens(o), INT32_MAX));
  check.range(o.max_context, "max_context (0: pages * page)", 1, v4 ? kMaxV4Context : INT32_MAX);
  check.range(o.decode_threshold, "decode_threshold", 0, INT32_MAX);
  check.range(o.split_size, "split_size", 1, INT32_MAX);
  check.that(o.route != nullptr, "route", "a function", "nothing");
  check.that(!o.mha || !v4, "mha", "false for V4, which has no projections", "true");
  o.mode = resolve_mode(o, check);
  check.that(o.precision == Precision::kFull || o.mode == Mode::kMixed || o.mode == Mode::kDirect,
             "precision", "kFull where tokens read bf16 rows", "kFp8");
  check.that(o.precision == Precision::kFull || !o.mha, "mha", "false with kFp8", "true");
  if (o.mode == Mode::kSeparate && o.workspace_rows == 0) o.workspace_rows = default_rows(o);
  check.range(o.workspace_rows, "workspace_rows", 0, INT32_MAX);  // rows are int32
  check_parallel(o);
  if (control_of(o.parallel) && o.parallel.spread == Spread::kQueries) {
    o.max_tokens = most_tokens(o.max_tokens, o.max_requests, o.parallel.shard());
    if (o.parallel.sharded && o.workspace_rows == 0) o.workspace_rows = o.max_context;
  }
  return o;
}

ScheduleShape schedule_shape(const PlanOptions& o, bool gathered, int64_t tokens) noexcept {
  ScheduleShape s;
  s.tokens = tokens;
  s.widths[0] = o.topk;
  s.widths[1] = o.extra_topk;
  // V4's gathered chunks attend to combined lists, padded to 128 columns.
  if (gathered && o.model.lists == 2)
    s.widths[0] = round_up(o.topk + o.extra_topk, 128) - o.extra_topk;
  s.ratio = o.ratio;
  s.workers = o.target.device.kind == DeviceKind::kCpu ? cpu::threads() : 1;
  s.split = o.split;
  s.split_size = o.split_size;
  return s;
}

Choice choose_kernels(const PlanOptions& o) {
  Chooser chooser{o.target};
  chooser.pick(Stage::kWrite, "write", write::kernels(), {{}});
  chooser.pick(Stage::kGather, "gather", write::gather_kernels(), {{}});
  chooser.pick(Stage::kLists, "lists", lists::kernels(), {{}});
  const score::Shape scores = score_shape(o, o.max_tokens);
  const auto score = chooser.pick(Stage::kScore, "score", score::kernels(), {scores});
  chooser.pick(Stage::kSelect, "select", select::kernels(), {select_shape(o, o.max_tokens)});
  chooser.pick(Stage::kLocate, "locate", locate::kernels(), {{}});

  const bool separate = o.mode == Mode::kSeparate;
  const attend::Shape paged = attend_shape(o, false, o.max_tokens, SIZE_MAX);
  const attend::Shape gathered = attend_shape(o, separate, o.max_tokens, SIZE_MAX);
  const auto attend = chooser.pick(Stage::kAttend, "attend", attend::kernels(), {gathered, paged});

  // Stages run one after the other: the largest need serves them all.
  const int64_t tiles = max_tiles(schedule_shape(o, separate, o.max_tokens));
  size_t& bytes = chooser.choice.workspace_bytes;
  for (const score::ScoreKernel* k : score) bytes = std::max(bytes, k->workspace(scores));
  for (const attend::AttendKernel* k : attend)
    for (const attend::Shape& s : {paged, gathered})
      if (!k->fits || !k->fits(s)) bytes = std::max(bytes, k->workspace(s, tiles));
  bytes += Arena::kAlign;  // the callee aligns it
  Check("plan").that(!o.target.kernel || chooser.known, "target.kernel", "a kernel of some stage",
                     o.target.kernel ? o.target.kernel : "");
  return std::move(chooser.choice);
}

const char* kernel_for(const Choice& choice, const PlanOptions& o, Stage stage, int64_t tokens,
                       bool gathered) noexcept {
  const Usable& usable = choice.usable[static_cast<size_t>(stage)];
  const detail::KernelEntry* found = usable.rows.front();
  if (stage == Stage::kScore) found = pick<score::ScoreKernel>(usable, score_shape(o, tokens));
  if (stage == Stage::kSelect) found = pick<select::SelectKernel>(usable, select_shape(o, tokens));
  if (stage == Stage::kAttend)
    found = pick<attend::AttendKernel>(usable,
                                       attend_shape(o, gathered, tokens, choice.workspace_bytes));
  return found ? found->name : "";
}

}  // namespace winnow::internal::plan
