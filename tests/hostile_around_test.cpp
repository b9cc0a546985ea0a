// What stands around the six verbs with damaged arguments: V4's lists, masked MHA, merging,
// projections, conversions (hostile.h says what must hold).
#include "hostile.h"

namespace winnow {
namespace {

using testing::calls;
using testing::Subject;
using testing::unpinned;

constexpr int64_t kTokens = 3, kHeads = 2, kWidth = 5, kPages = 4, kRows = 2;
constexpr int32_t kPage = 8;
constexpr int64_t kSlots = kPages * kPage;

std::shared_ptr<void> make_join(Subject& s) {
  auto a = calls(s,
                 JoinArgs{.latent = s.input<bf16>({kTokens, kHeads, 24}),
                          .rope = s.input<bf16>({kTokens, kHeads, 8}),
                          .out = s.output<bf16>({kTokens, kHeads, 32})},
                 join);
  s.damages(a->latent, a->rope, a->out, a->target);
  return a;
}

std::shared_ptr<void> make_quantize(Subject& s) {
  auto a = calls(s,
                 QuantizeArgs{.x = s.input<float>({kTokens, 37}),
                              .out = s.output<e4m3>({kTokens, 37}),
                              .scale = s.output<float>({1})},
                 quantize);
  s.damages(a->x, a->out, a->scale, a->target);
  return a;
}

// What the lists have in common.
template <class Args>
void damage_lists(Subject& s, Args& a) {
  s.damages(a.positions, a.requests, unpinned(a.block_table, 3), a.page, a.pages, a.target);
}

template <class Args>
Args list_args(Subject& s) {
  Args a;
  a.positions = s.numbers<int32_t>({kTokens}, -1, 30);
  a.requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1);
  a.block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1);
  a.page = kPage;
  a.pages = kPages;
  return a;
}

std::shared_ptr<void> make_slots(Subject& s) {
  auto a = calls(s, list_args<CompressedSlotsArgs>(s), compressed_slots);
  a->slots = s.output<int64_t>({kTokens + 1});
  damage_lists(s, *a);
  s.damages(unpinned(a->slots, 1), a->ratio);
  return a;
}

std::shared_ptr<void> make_c128a(Subject& s) {
  auto a = calls(s, list_args<C128aListsArgs>(s), c128a_lists);
  a->ratio = 4;
  a->decode_tokens = 2;
  a->lists = s.output<int32_t>({kTokens, 9});
  a->lengths = s.output<int32_t>({kTokens});
  damage_lists(s, *a);
  s.damages(unpinned(a->lists, 2), a->lengths, a->ratio, a->decode_tokens);
  return a;
}

std::shared_ptr<void> make_window(Subject& s) {
  auto a = calls(s, list_args<WindowListsArgs>(s), window_lists);
  a->window = 6;
  a->lists = s.output<int32_t>({kTokens, 9});
  a->lengths = s.output<int32_t>({kTokens});
  damage_lists(s, *a);
  s.damages(unpinned(a->lists, 2), a->lengths, a->window);
  return a;
}

std::shared_ptr<void> make_combined(Subject& s) {
  auto a = calls(s,
                 CombinedListsArgs{.topk = s.numbers<int32_t>({kTokens, kWidth}, -1, 7),
                                   .positions = s.numbers<int32_t>({kTokens}, -1, 30),
                                   .requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1),
                                   .seq_lens = s.numbers<int32_t>({kRows}, 0, 30),
                                   .gather_lens = s.numbers<int32_t>({kRows}, 0, 30),
                                   .window = 6,
                                   .compressed = 8,
                                   .rows = 40,
                                   .lists = s.output<int32_t>({kTokens, 128}),
                                   .lengths = s.output<int32_t>({kTokens})},
                 combined_lists);
  s.damages(unpinned(a->topk, 2), a->positions, a->requests, a->seq_lens, a->gather_lens,
            unpinned(a->lists, 2), a->lengths, a->ratio, a->window, a->compressed, a->rows,
            a->first_request, a->target);
  return a;
}

std::shared_ptr<void> make_mha(Subject& s) {
  auto a = calls(s,
                 MhaArgs{.q = s.input<bf16>({kTokens, kHeads, 24}),
                         .k = s.input<bf16>({20, kHeads, 24}),
                         .v = s.input<bf16>({20, kHeads, 16}),
                         .ids = s.numbers<int32_t>({kTokens, kWidth}, -1, 19),
                         .starts = s.numbers<int32_t>({kTokens}, 0, 5),
                         .lengths = s.numbers<int32_t>({kTokens}, 0, 20),
                         .bits = s.input<uint8_t>({kTokens, 3}, 0xff),
                         .bias = s.input<float>({kTokens, 20}, 0),
                         .scale = 0.2f,
                         .sink = s.input<float>({kHeads}),
                         .out = s.output<bf16>({kTokens, kHeads, 16}),
                         .lse = s.output<float>({kTokens, kHeads})},
                 attend_mha);
  s.damages(a->q, a->k, a->v, unpinned(a->ids, 2), a->starts, a->lengths, unpinned(a->bits, 2),
            unpinned(a->bias, 2), a->sink, a->out, a->lse, a->scale, a->target);
  return a;
}

std::shared_ptr<void> make_mask(Subject& s) {
  auto a = calls(s,
                 TopkMaskArgs{.ids = s.numbers<int32_t>({kTokens, kWidth}, -1, 30),
                              .lengths = s.numbers<int32_t>({kTokens}, 0, 30),
                              .mask = s.output<uint8_t>({kTokens, 4})},
                 topk_mask);
  s.damages(unpinned(a->ids, 2), a->lengths, unpinned(a->mask, 2), a->target);
  return a;
}

std::shared_ptr<void> make_merge(Subject& s) {
  auto a = calls(s,
                 MergeArgs{.partial_out = s.input<float>({2, kTokens, kHeads, 16}),
                           .partial_lse = s.input<float>({2, kTokens, kHeads}),
                           .sink = s.input<float>({kHeads}),
                           .out = s.output<float>({kTokens, kHeads, 16}),
                           .lse = s.output<float>({kTokens, kHeads})},
                 merge);
  s.damages(a->partial_out, a->partial_lse, a->sink, a->out, a->lse, a->target);
  return a;
}

std::shared_ptr<void> make_dequantize(Subject& s) {
  auto a = calls(s,
                 DequantizeWeightArgs{.weight = s.input<e4m3>({130, 40}),
                                      .scale = s.input<float>({2, 1}),
                                      .out = s.output<bf16>({130, 40})},
                 dequantize_weight);
  s.damages(a->weight, a->scale, a->out, a->target);
  return a;
}

constexpr int64_t kLatent = 24, kNope = 10, kRope = 4, kValue = 6;

std::shared_ptr<void> make_split(Subject& s) {
  auto a = calls(s,
                 SplitKvBArgs{.weight = s.input<bf16>({kLatent, kHeads, kNope + kValue}),
                              .w_uk = s.output<bf16>({kLatent, kHeads, kNope}),
                              .w_uv = s.output<bf16>({kLatent, kHeads, kValue})},
                 split_kv_b);
  s.damages(a->weight, a->w_uk, a->w_uv, a->target);
  return a;
}

std::shared_ptr<void> make_absorb(Subject& s) {
  auto a = calls(s,
                 AbsorbQueryArgs{.q_nope = s.input<bf16>({kTokens, kHeads, kNope}),
                                 .w_uk = s.input<bf16>({kLatent, kHeads, kNope}),
                                 .out = s.output<bf16>({kTokens, kHeads, kLatent})},
                 absorb_query);
  s.damages(a->q_nope, a->w_uk, a->out, a->target);
  return a;
}

std::shared_ptr<void> make_project(Subject& s) {
  auto a = calls(s,
                 ProjectOutputArgs{.attn = s.input<bf16>({kTokens, kHeads, kLatent}),
                                   .w_uv = s.input<bf16>({kLatent, kHeads, kValue}),
                                   .out = s.output<bf16>({kTokens, kHeads, kValue})},
                 project_output);
  s.damages(a->attn, a->w_uv, a->out, a->target);
  return a;
}

std::shared_ptr<void> make_decompress(Subject& s) {
  auto a = calls(s,
                 DecompressArgs{.latent = s.input<bf16>({kTokens, kLatent + kRope}),
                                .w_uk = s.input<bf16>({kLatent, kHeads, kNope}),
                                .w_uv = s.input<bf16>({kLatent, kHeads, kValue}),
                                .k = s.output<bf16>({kTokens, kHeads, kNope + kRope}),
                                .v = s.output<bf16>({kTokens, kHeads, kValue})},
                 decompress);
  s.damages(a->latent, a->w_uk, a->w_uv, a->k, a->v, a->target);
  return a;
}

std::shared_ptr<void> make_cut(Subject& s) {
  auto a = calls(s,
                 CutArgs{.ids = s.numbers<int32_t>({kTokens, kWidth}, -1, 30),
                         .values = s.input<float>({kTokens, kWidth}),
                         .kept = s.output<int32_t>({kTokens, kWidth}),
                         .counts = s.output<int32_t>({kTokens}),
                         .positions = s.output<int32_t>({kTokens, kWidth})},
                 cut);
  s.damages(a->ids, a->values, a->kept, a->counts, a->positions, a->shard.world, a->shard.rank,
            a->shard.interleave, a->form, a->target);
  return a;
}

std::shared_ptr<void> make_combine(Subject& s) {
  auto a = calls(s,
                 CombineArgs{.partial_out = s.input<float>({kTokens, kHeads, 16}),
                             .partial_lse = s.input<float>({kTokens, kHeads}),
                             .sink = s.input<float>({kHeads}),
                             .out = s.output<float>({kTokens, kHeads, 16}),
                             .lse = s.output<float>({kTokens, kHeads})},
                 combine);
  s.damages(a->partial_out, a->partial_lse, a->sink, a->out, a->lse, a->wire, a->target);
  return a;
}

// One of two ranks: the other one's bytes are what this one sends.
class Mirror final : public Communicator {
 public:
  int32_t rank() const noexcept override { return 0; }
  int32_t size() const noexcept override { return 2; }
  const char* name() const noexcept override { return "mirror"; }
  bool takes(DeviceKind kind) const noexcept override { return kind == DeviceKind::kCpu; }
  void all_gather(const void* send, void* recv, size_t bytes, const Device&) override {
    exchange(send, recv, bytes);
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device&) override {
    std::memcpy(recv, send, 2 * bytes);
  }
  void exchange(const void* send, void* recv, size_t bytes) override {
    for (int i = 0; i < 2; ++i) std::memcpy(static_cast<std::byte*>(recv) + i * bytes, send, bytes);
  }
  void check() override {}
};

std::shared_ptr<void> make_gather_prefix(Subject& s) {
  struct Prefix {
    Mirror ranks;
    Plan plan{{.heads = kHeads,
               .topk = kWidth,
               .index_heads = kHeads,
               .page = kPage,
               .pages = kPages,
               .max_requests = 2,
               .max_tokens = 8,
               .parallel = {.comm = &ranks, .spread = Spread::kQueries, .sharded = true}}};
    GatherPrefixArgs args;
  };
  auto p = std::make_shared<Prefix>();
  const int32_t starts[] = {0, 2, kTokens}, lens[] = {9, 7};
  p->plan.refill({starts, lens});
  const auto bytes = static_cast<int64_t>(gather_prefix_bytes(p->plan));
  p->args = {.plan = &p->plan,
             .cache = s.cache(CacheFormat::kV32Fp8, kPages, kPage),
             .block_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1),
             .keys = s.cache(CacheFormat::kIndexKeys, kPages, kPage),
             .key_table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1),
             .rows = {s.memory<std::byte>(bytes, true), static_cast<size_t>(bytes)}};
  s.call = [p] { gather_prefix(p->args); };
  GatherPrefixArgs& a = p->args;
  s.damages(a.cache, unpinned(a.block_table, 3), a.keys, unpinned(a.key_table, 3), a.rows,
            a.target);
  return p;
}

const testing::Verb kVerbs[] = {
    {"gather_prefix", {"gather_prefix", "plan"}, make_gather_prefix},
    {"cut", {"cut"}, make_cut},
    {"combine", {"combine", "merge"}, make_combine},
    {"join", {"join"}, make_join},
    {"quantize", {"quantize"}, make_quantize},
    {"compressed_slots", {"compressed_slots", "lists"}, make_slots},
    {"c128a_lists", {"c128a_lists", "lists"}, make_c128a},
    {"window_lists", {"window_lists", "lists"}, make_window},
    {"combined_lists", {"combined_lists", "lists"}, make_combined},
    {"attend_mha", {"attend_mha", "mha"}, make_mha},
    {"topk_mask", {"topk_mask", "mask"}, make_mask},
    {"merge", {"merge"}, make_merge},
    {"dequantize_weight", {"dequantize_weight"}, make_dequantize},
    {"split_kv_b", {"split_kv_b", "absorb"}, make_split},
    {"absorb_query", {"absorb_query", "absorb"}, make_absorb},
    {"project_output", {"project_output", "absorb"}, make_project},
    {"decompress", {"decompress", "absorb"}, make_decompress},
};

class Hostile : public ::testing::TestWithParam<testing::Verb> {};

TEST_P(Hostile, ErrorsOrSuccessAndNothingElse) { testing::sweep(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Verbs, Hostile, ::testing::ValuesIn(kVerbs),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace winnow
