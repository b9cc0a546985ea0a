// The six verbs, gather, plans and the pipeline with damaged arguments (hostile.h says what must
// hold). WINNOW_HOSTILE_ROUNDS sets how often each is called, WINNOW_HOSTILE_SEED where the random
// numbers begin.
#include "hostile.h"

namespace winnow {
namespace {

using testing::calls;
using testing::Subject;
using testing::unpinned;

constexpr int64_t kTokens = 3, kHeads = 2, kWidth = 5, kPages = 4, kRows = 2;
constexpr int32_t kPage = 8;
constexpr int64_t kSlots = kPages * kPage;

std::shared_ptr<void> make_write(Subject& s) {
  constexpr CacheFormat formats[] = {CacheFormat::kV32Fp8, CacheFormat::kV4Fp8,
                                     CacheFormat::kV32Bf16, CacheFormat::kIndexKeys,
                                     CacheFormat::kIndexKeysBf16};
  const CacheFormat format = formats[testing::draw(s.rng(), 0, 4)];
  auto a = calls(s,
                 WriteArgs{.kv = s.input<bf16>({kTokens, record_dim(format)}),
                           .slots = s.numbers<int64_t>({kTokens}, -1, kSlots - 1),
                           .cache = s.cache(format, kPages, kPage, true)},
                 write);
  s.damages(unpinned(a->kv, 1), a->slots, a->cache, a->scale, a->target);
  return a;
}

std::shared_ptr<void> make_gather(Subject& s) {
  auto a = calls(s,
                 GatherArgs{.cache = s.cache(CacheFormat::kV4Fp8, kPages, kPage),
                            .block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1),
                            .starts = s.numbers<int32_t>({kRows}, 0, 9),
                            .lengths = s.numbers<int32_t>({kRows}, 0, 9),
                            .out_starts = s.numbers<int32_t>({kRows}, 0, 15),
                            .out = s.output<bf16>({20, 512})},
                 gather);
  s.damages(a->cache, unpinned(a->block_table, 2), a->starts, a->lengths, a->out_starts,
            unpinned(a->out, 1), a->target);
  return a;
}

ScoreArgs score_args(Subject& s, bool paged) {
  // Memory for either type of queries and keys: a damaged dtype may be the other one.
  const auto keys_of_either = [&](std::initializer_list<int64_t> shape) {
    Tensor t = s.input<bf16>(shape);
    t.dtype = DType::kE4m3;
    return t;
  };
  ScoreArgs a{.q = keys_of_either({kTokens, kHeads, kIndexDim}),
              .weights = s.input<float>({kTokens, kHeads}),
              .ends = s.numbers<int32_t>({kTokens}, 0, 20)};
  if (paged) {
    a.keys = s.cache(CacheFormat::kIndexKeys, kPages, kPage);
    a.block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1);
    a.requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1);
  } else {
    a.key_rows = keys_of_either({20, kIndexDim});
    a.key_scales = s.input<float>({20});
    a.starts = s.numbers<int32_t>({kTokens}, 0, 10);
  }
  return a;
}

void damage_score(Subject& s, ScoreArgs& a, bool paged) {
  s.damages(a.q, a.weights, a.ends, a.target);
  if (paged) s.damages(a.keys, unpinned(a.block_table, 3), a.requests);
  else s.damages(a.key_rows, a.key_scales, a.starts);
}

template <bool paged>
std::shared_ptr<void> make_score(Subject& s) {
  auto a = calls(s, score_args(s, paged), score);
  a->logits = s.output<float>({kTokens, 20});
  a->clean = testing::draw(s.rng(), 0, 1);
  damage_score(s, *a, paged);
  s.damages(unpinned(a->logits, paged ? 2 : 0));
  return a;
}

template <bool paged>
std::shared_ptr<void> make_score_select(Subject& s) {
  ScoreSelectArgs args{.score = score_args(s, paged), .ids = s.output<int32_t>({kTokens, kWidth})};
  args.workspace = {s.memory<std::byte>(4096, true), 4096};
  auto a = calls(s, args, score_select);
  damage_score(s, a->score, paged);
  s.damages(unpinned(a->ids, 2), a->workspace);
  return a;
}

std::shared_ptr<void> make_select(Subject& s) {
  auto a = calls(s,
                 SelectArgs{.logits = s.input<float>({kTokens, 20}),
                            .starts = s.numbers<int32_t>({kTokens}, 0, 10),
                            .ends = s.numbers<int32_t>({kTokens}, 0, 20),
                            .ids = s.output<int32_t>({kTokens, kWidth})},
                 select);
  if (testing::draw(s.rng(), 0, 1))
    a->blocks = {.size = 4,
                 .within = s.numbers<int32_t>({kTokens, 3}, 0, 4),
                 .best = s.output<int32_t>({kTokens, 3})};
  s.damages(unpinned(a->logits, 2), a->starts, a->ends, unpinned(a->ids, 2), a->blocks.size,
            unpinned(a->blocks.within, 2), unpinned(a->blocks.best, 2), a->target);
  return a;
}

std::shared_ptr<void> make_locate(Subject& s) {
  auto a = calls(s,
                 LocateArgs{.ids = s.numbers<int32_t>({kTokens, kWidth}, 0, 23),
                            .requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1),
                            .block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1),
                            .page = kPage,
                            .pages = kPages,
                            .prefill_requests = s.numbers<int32_t>({kTokens}, -1, 1),
                            .workspace_starts = s.numbers<int32_t>({2}, 0, 9),
                            .workspace_rows = 40,
                            .slots = s.output<int32_t>({kTokens, kWidth}),
                            .counts = s.output<int32_t>({kTokens})},
                 locate);
  s.damages(a->ids, a->requests, unpinned(a->block_table, 3), a->slots, a->prefill_requests,
            unpinned(a->workspace_starts, 1), a->counts, a->page, a->pages, a->rows_per_page,
            a->target, a->workspace_rows, a->parallel.world, a->parallel.rank,
            a->parallel.interleave, a->part);
  return a;
}

AttendArgs attend_args(Subject& s, CacheFormat format, int lists, bool logical) {
  const int64_t d = record_dim(format);
  AttendArgs a{.q = s.input<bf16>({kTokens, kHeads, d}),
               .scale = 0.1f,
               .sink = s.input<float>({kHeads}),
               .out = s.output<bf16>({kTokens, kHeads, 512}),
               .lse = s.output<float>({kTokens, kHeads}),
               .max_logit = s.output<float>({kTokens, kHeads})};
  for (int i = 0; i < lists; ++i) {
    a.lists[i] = {.cache = s.cache(format, kPages, kPage),
                  .indices = s.numbers<int32_t>({kTokens, kWidth}, -1, kSlots - 1),
                  .lengths = s.numbers<int32_t>({kTokens}, 0, kWidth)};
    if (logical) a.lists[i].block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1);
  }
  if (logical) a.requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1);
  return a;
}

void damage_attend(Subject& s, AttendArgs& a) {
  s.damages(a.q, a.q_rope, a.requests, a.sink, a.out, a.lse, a.max_logit, a.scale, a.target);
  for (KvList& list : a.lists) {
    s.damages(list.cache, unpinned(list.indices, 2), list.lengths, unpinned(list.block_table, 3));
  }
}

template <int kind>
std::shared_ptr<void> make_attend(Subject& s) {
  constexpr CacheFormat formats[] = {CacheFormat::kV32Fp8, CacheFormat::kV32Bf16,
                                     CacheFormat::kV4Fp8, CacheFormat::kV4Bf16};
  auto a = calls(s, attend_args(s, formats[kind], kind < 2 ? 1 : 2, kind % 2 == 0), attend);
  static std::vector<std::byte> workspace(size_t{64} << 20);  // large, and its contents nobody's
  a->workspace = workspace;
  damage_attend(s, *a);
  s.damages(a->workspace, a->part);
  return a;
}

std::shared_ptr<void> make_planned_attend(Subject& s) {
  struct Planned {
    Plan plan{{.heads = kHeads, .topk = kWidth, .pages = 64, .max_requests = 4, .max_tokens = 8}};
    AttendArgs args;
    std::vector<std::byte> workspace = std::vector<std::byte>(plan.workspace_bytes());
  };
  auto p = std::make_shared<Planned>();
  const int32_t starts[] = {0, 1, 3}, lens[] = {30, 20};
  p->plan.refill({starts, lens});
  p->args = attend_args(s, CacheFormat::kV32Fp8, 1, false);
  p->args.plan = &p->plan;
  p->args.workspace = p->workspace;
  s.call = [p] { attend(p->args); };
  damage_attend(s, p->args);
  s.damages(p->args.workspace, p->args.part);
  return p;
}

// A plan and a batch: both damaged.
std::shared_ptr<void> make_plan(Subject& s) {
  struct Planned {
    PlanOptions options{
        .heads = kHeads, .topk = 16, .pages = 64, .max_requests = 4, .max_tokens = 16};
    Tensor starts, lens;
    int64_t tokens = 0;
  };
  auto p = std::make_shared<Planned>();
  const bool v4 = testing::draw(s.rng(), 0, 1);
  if (v4) {
    p->options.model = kV4;
    p->options.format = kV4.fp8;
    p->options.extra_topk = 16;
  }
  p->starts = s.numbers<int32_t>({3}, 0, 5);
  p->lens = s.numbers<int32_t>({2}, 0, 60);
  if (testing::draw(s.rng(), 0, 1)) {
    const int32_t starts[] = {0, 1, 9}, lens[] = {30, 40};
    std::memcpy(p->starts.data, starts, sizeof(starts));
    std::memcpy(p->lens.data, lens, sizeof(lens));
  }
  s.call = [p] {
    Plan plan(p->options);
    const auto* starts = static_cast<const int32_t*>(p->starts.data);
    const auto* lens = static_cast<const int32_t*>(p->lens.data);
    plan.refill({{starts, 3}, {lens, 2}, p->tokens});
    plan.kernel(Stage::kAttend);
  };
  PlanOptions& o = p->options;
  s.damages(o.model.d_qk, o.model.d_v, o.model.d_nope, o.model.d_rope, o.model.lists, o.model.fp8,
            o.model.bf16, o.format, o.heads, o.extra_topk, o.ratio, o.index_heads, o.page, o.pages,
            o.max_requests, o.max_tokens, o.max_context, o.decode_threshold, o.mode,
            o.workspace_rows, o.split, o.split_size, o.target, p->tokens);
  return p;
}

std::shared_ptr<void> make_pipeline(Subject& s) {
  struct Layer {
    Plan plan{{.heads = kHeads,
               .topk = kWidth,
               .index_heads = kHeads,
               .page = kPage,
               .pages = kPages,
               .max_requests = 4,
               .max_tokens = 8}};
    PipelineArgs args;
  };
  auto p = std::make_shared<Layer>();
  const int32_t starts[] = {0, 1, kTokens}, lens[] = {9, 12};
  p->plan.refill({starts, lens});
  static std::vector<std::byte> workspace(pipeline_workspace_bytes(p->plan));
  PipelineArgs& a = p->args;
  a = {.plan = &p->plan,
       .kv = s.input<bf16>({kTokens, 576}),
       .slots = s.numbers<int64_t>({kTokens}, 0, kSlots - 1),
       .cache = s.cache(CacheFormat::kV32Fp8, kPages, kPage, true),
       .block_table = s.numbers<int32_t>({2, 3}, 0, kPages - 1),
       .indexer = {.k = s.input<bf16>({kTokens, kIndexDim}),
                   .slots = s.numbers<int64_t>({kTokens}, 0, kSlots - 1),
                   .keys = s.cache(CacheFormat::kIndexKeys, kPages, kPage, true),
                   .block_table = s.numbers<int32_t>({2, 3}, 0, kPages - 1),
                   .q = s.input<e4m3>({kTokens, kHeads, kIndexDim}),
                   .weights = s.input<float>({kTokens, kHeads})},
       .q = s.input<bf16>({kTokens, kHeads, 576}),
       .scale = 0.1f,
       .sink = s.input<float>({kHeads}),
       .out = s.output<bf16>({kTokens, kHeads, 512}),
       .lse = s.output<float>({kTokens, kHeads}),
       .workspace = workspace,
       .ids = s.output<int32_t>({kTokens, p->plan.options().topk}),
       .blocks = {.size = 4,
                  .within = s.numbers<int32_t>({kTokens, 2}, 0, 3),
                  .best = s.output<int32_t>({kTokens, 2})}};
  s.call = [p] { pipeline(p->args); };
  s.damages(unpinned(a.kv, 1), a.slots, a.cache, unpinned(a.block_table, 3),
            unpinned(a.indexer.k, 1), a.indexer.slots, a.indexer.keys,
            unpinned(a.indexer.block_table, 3), a.indexer.q, a.indexer.weights, a.q, a.scale,
            a.sink, a.out, a.lse, a.workspace, a.target, a.compressed, a.compressed_kv, a.ids,
            a.blocks.size, unpinned(a.blocks.within, 2), unpinned(a.blocks.best, 2));
  return p;
}

const testing::Verb kVerbs[] = {
    {"write", {"write"}, make_write},
    {"gather", {"gather"}, make_gather},
    {"score_paged", {"score"}, make_score<true>},
    {"score_rows", {"score"}, make_score<false>},
    {"score_select_paged", {"score_select"}, make_score_select<true>},
    {"score_select_rows", {"score_select"}, make_score_select<false>},
    {"select", {"select"}, make_select},
    {"locate", {"locate"}, make_locate},
    {"attend_v32_fp8", {"attend"}, make_attend<0>},
    {"attend_v32_bf16", {"attend"}, make_attend<1>},
    {"attend_v4_fp8", {"attend"}, make_attend<2>},
    {"attend_v4_bf16", {"attend"}, make_attend<3>},
    {"attend_planned", {"attend", "plan"}, make_planned_attend},
    {"plan",
     {"plan", "write", "gather", "lists", "score", "select", "locate", "attend"},
     make_plan},
    {"pipeline", {"pipeline", "plan"}, make_pipeline},
};

class Hostile : public ::testing::TestWithParam<testing::Verb> {};

TEST_P(Hostile, ErrorsOrSuccessAndNothingElse) { testing::sweep(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Verbs, Hostile, ::testing::ValuesIn(kVerbs),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace winnow
