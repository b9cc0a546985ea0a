// Every verb as a call on device memory (cuda_verb.h).
#pragma once

#include "cuda_layer_verbs.h"
#include "cuda_verb.h"
#include "winnow/absorb.h"
#include "winnow/attend.h"
#include "winnow/combine.h"
#include "winnow/cut.h"
#include "winnow/lists.h"
#include "winnow/locate.h"
#include "winnow/model.h"
#include "winnow/score.h"
#include "winnow/select.h"
#include "winnow/write.h"

namespace winnow::testing {

inline VerbPtr write_verb() {
  auto v = std::make_unique<Verb>("write");
  const int64_t t = 9;
  bf16* kv = v->bf16s(t * 576);
  auto* slots = v->input<int64_t>({3, -1, 100, 0, 127, 5000, 64, 65, -7},
                                  {4, 9, -1, 1, 126, 2, INT64_MAX, 63, 80});
  auto* pages = v->output<uint8_t>(2 * page_bytes(CacheFormat::kV32Fp8, 64));
  v->run = [=](const Device& d) {
    write({.kv = tensor(kv, {t, 576}),
           .slots = tensor(slots, {t}),
           .cache = {pages, CacheFormat::kV32Fp8, 2, 64},
           .target = {.device = d}});
  };
  return v;
}

inline VerbPtr gather_verb() {
  auto v = std::make_unique<Verb>("gather");
  const Cache cache = random_cache(*v, CacheFormat::kV4Fp8, 6, 16);
  int32_t* table = v->ints(2 * 4, 0, 5);
  auto* starts = v->input<int32_t>({5, 0}, {0, 20});
  auto* lengths = v->input<int32_t>({30, 12}, {9, 33});
  bf16* out = v->output<bf16>(64 * 512);
  v->run = [=](const Device& d) {
    gather({.cache = cache,
            .block_table = tensor(table, {2, 4}),
            .starts = tensor(starts, {2}),
            .lengths = tensor(lengths, {2}),
            .out = tensor(out, {64, 512}),
            .target = {.device = d}});
  };
  return v;
}

inline VerbPtr join_verb() {
  auto v = std::make_unique<Verb>("join");
  bf16 *latent = v->bf16s(3 * 2 * 512), *rope = v->bf16s(3 * 2 * 64);
  bf16* out = v->output<bf16>(3 * 2 * 576);
  v->run = [=](const Device& d) {
    join({.latent = tensor(latent, {3, 2, 512}),
          .rope = tensor(rope, {3, 2, 64}),
          .out = tensor(out, {3, 2, 576}),
          .target = {.device = d}});
  };
  return v;
}

inline VerbPtr quantize_verb() {
  auto v = std::make_unique<Verb>("quantize");
  float* x = v->floats(1000);
  auto* out = v->output<e4m3>(1000);
  float* scale = v->output<float>(1);
  v->run = [=](const Device& d) {
    quantize({.x = tensor(x, {1000}),
              .out = tensor(out, {1000}),
              .scale = tensor(scale, {1}),
              .target = {.device = d}});
  };
  return v;
}

// score, or score_select, over paged keys.
inline VerbPtr score_verb(bool selected) {
  auto v = std::make_unique<Verb>(selected ? "score_select" : "score");
  const int64_t t = 5, heads = 8, width = 9;
  ScoreArgs a{.q = tensor(v->codes(t * heads * 128), {t, heads, 128}),
              .weights = tensor(v->floats(t * heads), {t, heads}),
              .keys = random_cache(*v, CacheFormat::kIndexKeys, 12, 64),
              .block_table = tensor(v->ints(2 * width, 0, 11), {2, width}),
              .requests = tensor(v->input<int32_t>({0, 1, 0, 7, 1}, {1, 0, 1, 0, -2}), {t}),
              .ends = tensor(
                  v->input<int32_t>({400, 576, 0, 100, INT32_MAX}, {10, 500, -3, 64, 333}), {t})};
  if (!selected) {
    a.logits = tensor(v->output<float>(t * 576), {t, 576});
    a.clean = true;
    v->run = [=](const Device& d) mutable { a.target.device = d, score(a); };
    return v;
  }
  ScoreSelectArgs s{.score = a, .ids = tensor(v->output<int32_t>(t * 100), {t, 100})};
  s.score.target.device = cuda();
  s.workspace = v->workspace(score_select_workspace_bytes(s));
  v->run = [=](const Device& d) mutable { s.score.target.device = d, score_select(s); };
  return v;
}

// Logits of contiguous keys, with starts.
inline VerbPtr score_rows_verb() {
  auto v = std::make_unique<Verb>("score_rows");
  const int64_t t = 20, heads = 64, n = 300;
  ScoreArgs a{.q = tensor(v->codes(t * heads * 128), {t, heads, 128}),
              .weights = tensor(v->floats(t * heads), {t, heads}),
              .key_rows = tensor(v->codes(n * 128), {n, 128}),
              .key_scales = tensor(v->floats(n), {n}),
              .starts = tensor(v->ints(t, 0, 90), {t}),
              .ends = tensor(v->ints(t, 100, n), {t}),
              .logits = tensor(v->output<float>(t * n), {t, n}),
              .clean = true};
  v->run = [=](const Device& d) mutable { a.target.device = d, score(a); };
  return v;
}

inline VerbPtr select_verb(int64_t keys, int64_t topk, int64_t t = 4) {
  auto v = std::make_unique<Verb>("select");
  const int32_t n = static_cast<int32_t>(keys), some[2][4] = {{n, 20, -1, n - 500}, {100, n, 7, 1}};
  std::vector<int32_t> ends[2];
  for (int64_t i = 0; i < t; ++i)
    ends[0].push_back(some[0][i % 4]), ends[1].push_back(some[1][i % 4]);
  SelectArgs a{.logits = tensor(v->floats(t * keys), {t, keys}),
               .ends = tensor(v->input<int32_t>(ends[0], ends[1]), {t}),
               .ids = tensor(v->output<int32_t>(t * topk), {t, topk})};
  v->run = [=](const Device& d) mutable { a.target.device = d, select(a); };
  return v;
}

inline VerbPtr locate_verb() {
  auto v = std::make_unique<Verb>("locate");
  LocateArgs a{.ids = tensor(v->ints(4 * 300, 0, 511), {4, 300}),
               .requests = tensor(v->ints(4, 0, 1), {4}),
               .block_table = tensor(v->ints(2 * 8, 0, 9), {2, 8}),
               .pages = 10,
               .slots = tensor(v->output<int32_t>(4 * 300), {4, 300}),
               .counts = tensor(v->output<int32_t>(4), {4})};
  v->run = [=](const Device& d) mutable { a.target.device = d, locate(a); };
  return v;
}

inline VerbPtr lists_verb() {  // the four of them
  auto v = std::make_unique<Verb>("lists");
  const int64_t t = 6;
  const Tensor positions =
      tensor(v->input<int32_t>({0, 127, 700, -1, 255, 511}, {3, INT32_MAX, 20, 131, -5, 640}), {t});
  const Tensor requests = tensor(v->ints(t, 0, 1), {t}), table = tensor(v->ints(16, 0, 9), {2, 8});
  const Tensor lens = tensor(v->input<int32_t>({700, 512}, {650, 140}), {2});
  const Tensor gathered = tensor(v->input<int32_t>({130, 128}, {200, INT32_MAX}), {2});
  const Tensor topk = tensor(v->ints(t * 40, 0, 99), {t, 40});
  const auto rows = [&](int64_t width) {
    return tensor(v->output<int32_t>(t * width), {t, width});
  };
  const auto lengths = [&] { return tensor(v->output<int32_t>(t), {t}); };
  CompressedSlotsArgs slots{.positions = positions,
                            .requests = requests,
                            .block_table = table,
                            .pages = 10,
                            .slots = tensor(v->output<int64_t>(8), {8})};
  C128aListsArgs states{.positions = positions,
                        .requests = requests,
                        .block_table = table,
                        .pages = 10,
                        .decode_tokens = 4,
                        .lists = rows(50),
                        .lengths = lengths()};
  WindowListsArgs window{.positions = positions,
                         .requests = requests,
                         .block_table = table,
                         .pages = 10,
                         .lists = rows(128),
                         .lengths = lengths()};
  CombinedListsArgs both{.topk = topk,
                         .positions = positions,
                         .requests = requests,
                         .seq_lens = lens,
                         .gather_lens = gathered,
                         .compressed = 90,
                         .rows = 300,
                         .lists = rows(256),
                         .lengths = lengths()};
  v->run = [=](const Device& d) mutable {
    slots.target.device = d, compressed_slots(slots);
    states.target.device = d, c128a_lists(states);
    window.target.device = d, window_lists(window);
    both.target.device = d, combined_lists(both);
  };
  return v;
}

// One list of V3.2, as logical ids where its table is requested, or two lists of V4 with lengths
// and a sink.
struct AttendShape {
  const char* name;
  CacheFormat format;
  int64_t tokens, heads, topk;
  bool ids = false;
};
inline constexpr AttendShape kAttendShapes[] = {
    {"attend_v32", CacheFormat::kV32Fp8, 3, 20, 200, true},
    {"attend_v4", CacheFormat::kV4Fp8, 3, 20, 200},
    {"attend_v32_128_heads", CacheFormat::kV32Fp8, 2, 128, 1000},  // cut among CTAs
    {"attend_v4_64_heads", CacheFormat::kV4Fp8, 2, 64, 128},
    // Tokens that are helped, with one main CTA each and with two.
    {"attend_v32_helped", CacheFormat::kV32Fp8, 36, 128, 1600, true},
    {"attend_v32_two_mains", CacheFormat::kV32Fp8, 24, 128, 2048},
    {"attend_v32_bf16", CacheFormat::kV32Bf16, 140, 48, 130},  // a prefill: more tokens than SMs
    {"attend_v4_bf16", CacheFormat::kV4Bf16, 5, 8, 70},
};

inline VerbPtr attend_verb(const AttendShape& s) {
  auto v = std::make_unique<Verb>(s.name);
  const bool v4 = s.format == CacheFormat::kV4Fp8 || s.format == CacheFormat::kV4Bf16;
  const Model& m = v4 ? kV4 : kV32;
  const int64_t t = s.tokens, heads = s.heads;
  AttendArgs a{.q = tensor(v->bf16s(t * heads * m.d_qk), {t, heads, m.d_qk}),
               .scale = 0.01f,
               .out = tensor(v->output<bf16>(t * heads * 512), {t, heads, 512}),
               .lse = tensor(v->output<float>(t * heads), {t, heads}),
               .max_logit = tensor(v->output<float>(t * heads), {t, heads})};
  a.lists[0] = {.cache = random_cache(*v, s.format, 5, 64),
                .indices = tensor(v->ints(t * s.topk, 0, 319), {t, s.topk})};
  if (v4) {
    std::vector<int32_t> lengths[2];
    for (int i = 0; i < t; ++i)
      lengths[0].push_back(i == 1 ? 0 : 200 >> i), lengths[1].push_back(i == 2 ? -1 : 150 * i);
    a.lists[0].lengths = tensor(v->input<int32_t>(lengths[0], lengths[1]), {t});
    a.lists[1] = {.cache = random_cache(*v, s.format, 4, 2),
                  .indices = tensor(v->ints(t * 37, 0, 7), {t, 37})};
    a.sink = tensor(v->floats(heads), {heads});
  }
  if (s.ids) {
    a.lists[0].block_table = tensor(v->ints(2 * 5, 0, 4), {2, 5});
    a.requests = tensor(v->ints(t, 0, 1), {t});
  }
  a.target.device = cuda();
  a.workspace = v->workspace(attend_workspace_bytes(a));
  v->run = [=](const Device& d) mutable { a.target.device = d, attend(a); };
  return v;
}

inline VerbPtr merge_verb() {
  auto v = std::make_unique<Verb>("merge");
  MergeArgs a{.partial_out = tensor(v->floats(3 * 2 * 4 * 100), {3, 2, 4, 100}),
              .partial_lse = tensor(v->floats(3 * 2 * 4), {3, 2, 4}),
              .sink = tensor(v->floats(4), {4}),
              .out = tensor(v->output<bf16>(2 * 4 * 100), {2, 4, 100}),
              .lse = tensor(v->output<float>(2 * 4), {2, 4})};
  v->run = [=](const Device& d) mutable { a.target.device = d, merge(a); };
  return v;
}

// Of one rank: hostile ids and values, the same ids again.
inline VerbPtr cut_verb() {
  auto v = std::make_unique<Verb>("cut");
  CutArgs a{.ids = tensor(v->ints(5 * 300, 0, 900), {5, 300}),
            .values = tensor(v->floats(5 * 300), {5, 300}),
            .kept = tensor(v->output<int32_t>(5 * 300), {5, 300}),
            .counts = tensor(v->output<int32_t>(5), {5}),
            .positions = tensor(v->output<int32_t>(5 * 300), {5, 300}),
            .target = {.device = cuda()}};
  a.workspace = v->workspace(cut_workspace_bytes(a));
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    cut(a);
  };
  return v;
}

inline VerbPtr combine_verb() {
  auto v = std::make_unique<Verb>("combine");
  CombineArgs a{.partial_out = tensor(v->floats(3 * 4 * 100), {3, 4, 100}),
                .partial_lse = tensor(v->floats(3 * 4), {3, 4}),
                .sink = tensor(v->floats(4), {4}),
                .out = tensor(v->output<bf16>(3 * 4 * 100), {3, 4, 100}),
                .lse = tensor(v->output<float>(3 * 4), {3, 4}),
                .target = {.device = cuda()}};
  a.workspace = v->workspace(combine_workspace_bytes(a));
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    combine(a);
  };
  return v;
}

inline VerbPtr mask_verb() {
  auto v = std::make_unique<Verb>("topk_mask");
  TopkMaskArgs a{.ids = tensor(v->ints(3 * 50, 0, 159), {3, 50}),
                 .lengths = tensor(v->ints(3, 0, 160), {3}),
                 .mask = tensor(v->output<uint8_t>(3 * 21), {3, 21})};
  v->run = [=](const Device& d) mutable { a.target.device = d, topk_mask(a); };
  return v;
}

// Eight heads and fewer than two rows a token: clusters of eight.
inline VerbPtr mha_verb(int64_t heads, int64_t n, bool mask, int64_t d = 192) {
  auto v = std::make_unique<Verb>("attend_mha");
  const int64_t t = 70;
  MhaArgs a{.q = tensor(v->bf16s(t * heads * d), {t, heads, d}),
            .k = tensor(v->bf16s(n * heads * d), {n, heads, d}),
            .v = tensor(v->bf16s(n * heads * 128), {n, heads, 128}),
            .ids = tensor(v->ints(t * 60, 0, n - 1), {t, 60}),
            .lengths = tensor(v->ints(t, 0, n), {t}),
            .scale = 0.05f,
            .sink = tensor(v->floats(heads), {heads}),
            .out = tensor(v->output<bf16>(t * heads * 128), {t, heads, 128}),
            .lse = tensor(v->output<float>(t * heads), {t, heads})};
  const auto some = [](Rng& r) { return static_cast<uint8_t>(draw(r, 0, 1)); };
  if (mask) a.mask = tensor(v->input<uint8_t>(t * n, some), {t, n});
  v->run = [=](const Device& d) mutable { a.target.device = d, attend_mha(a); };
  return v;
}

struct AbsorbSizes {
  int64_t t, h, l, p, r;
};
inline VerbPtr absorb_verb(const AbsorbSizes& sizes) {  // all five
  auto v = std::make_unique<Verb>("absorb");
  const auto [t, h, l, p, r] = sizes;
  const auto out = [&](int64_t a, int64_t b, int64_t c) {
    return tensor(v->output<bf16>(a * b * c), {a, b, c});
  };
  DequantizeWeightArgs whole{.weight = tensor(v->codes(130 * 200), {130, 200}),
                             .scale = tensor(v->floats(4), {2, 2}),
                             .out = tensor(v->output<bf16>(130 * 200), {130, 200})};
  SplitKvBArgs split{.weight = tensor(v->bf16s(l * h * 2 * p), {l, h, 2 * p}),
                     .w_uk = out(l, h, p),
                     .w_uv = out(l, h, p)};
  AbsorbQueryArgs query{
      .q_nope = tensor(v->bf16s(t * h * p), {t, h, p}), .w_uk = split.w_uk, .out = out(t, h, l)};
  ProjectOutputArgs project{.attn = query.out, .w_uv = split.w_uv, .out = out(t, h, p)};
  DecompressArgs open{.latent = tensor(v->bf16s(t * (l + r)), {t, l + r}),
                      .w_uk = split.w_uk,
                      .w_uv = split.w_uv,
                      .k = out(t, h, p + r),
                      .v = out(t, h, p)};
  v->run = [=](const Device& d) mutable {
    whole.target.device = d, dequantize_weight(whole);
    split.target.device = d, split_kv_b(split);
    query.target.device = d, absorb_query(query);
    project.target.device = d, project_output(project);
    open.target.device = d, decompress(open);
  };
  return v;
}

inline std::vector<std::pair<const char*, std::function<VerbPtr()>>> verbs() {
  std::vector<std::pair<const char*, std::function<VerbPtr()>>> all = {
      {"norm", norm_verb},
      {"rotate", rotate_verb},
      {"prepare_query", prepare_query_verb},
      {"index_query", index_query_verb},
      {"prepare_queries", prepare_queries_verb},
      {"norm_write", norm_write_verb},
      {"compress", [] { return compress_verb(4, true, false); }},
      {"compress_ring", [] { return compress_verb(4, true, true); }},
      {"compress_long", [] { return compress_verb(128, false, false); }},
      {"write_projections", write_projections_verb},
      {"write", write_verb},
      {"gather", gather_verb},
      {"join", join_verb},
      {"quantize", quantize_verb},
      {"score", [] { return score_verb(false); }},
      {"score_rows", score_rows_verb},
      {"score_select", [] { return score_verb(true); }},
      {"select", [] { return select_verb(3000, 256); }},
      {"select_wide", [] { return select_verb(40000, 2048); }},
      {"locate", locate_verb},
      {"lists", lists_verb},
      {"merge", merge_verb},
      {"cut", cut_verb},
      {"combine", combine_verb},
      {"topk_mask", mask_verb},
      {"attend_mha", [] { return mha_verb(3, 300, false); }},
      {"attend_mha_clusters", [] { return mha_verb(8, 130, true); }},
      {"absorb",
       [] {
         return absorb_verb({70, 2, 96, 40, 16});
       }},
      {"absorb_many", [] {
         return absorb_verb({330, 32, 256, 72, 16});
       }}};
  for (const AttendShape& s : kAttendShapes)
    all.emplace_back(s.name, [&s] { return attend_verb(s); });
  return all;
}

}  // namespace winnow::testing
