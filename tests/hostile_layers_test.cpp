// The steps in front of the six verbs with damaged arguments (hostile.h says what must hold).
#include "hostile.h"

namespace winnow {
namespace {

using testing::calls;
using testing::Subject;
using testing::unpinned;

constexpr int64_t kTokens = 3, kHeads = 2, kWidth = 70, kPositions = 10, kPages = 4, kRows = 2;
constexpr int32_t kPage = 8;

Rope rope(Subject& s) {
  Rope r;
  r.table = s.input<float>({kPositions, 2, 32});
  r.inverse = testing::draw(s.rng(), 0, 1);
  return r;
}
void damage_rope(Subject& s, Rope& r) { s.damages(unpinned(r.table, 1), r.pairs, r.slice); }

Norm norm_of(Subject& s, int64_t width) {
  Norm n;
  n.weight = s.input<float>({width});
  n.bias = s.input<float>({width});
  return n;
}
void damage_norm(Subject& s, Norm& n) { s.damages(n.kind, n.weight, n.bias, n.eps); }

NormArgs norm_args(Subject& s) {
  NormArgs a;
  a.rows[0] = {s.input<bf16>({kTokens, 33}), s.output<bf16>({kTokens, 33}), norm_of(s, 33)};
  a.rows[1] = {s.input<bf16>({kTokens, 9}), s.output<bf16>({kTokens, 9}), norm_of(s, 9)};
  return a;
}
void damage_norms(Subject& s, NormArgs& a) {
  for (NormRows& rows : a.rows) {
    s.damages(rows.x, rows.out);
    damage_norm(s, rows.norm);
  }
}
std::shared_ptr<void> make_norm(Subject& s) {
  auto a = calls(s, norm_args(s), norm);
  damage_norms(s, *a);
  s.damages(a->target);
  return a;
}

std::shared_ptr<void> make_rotate(Subject& s) {
  const bool quantized = testing::draw(s.rng(), 0, 1);
  const int64_t width = quantized ? 128 : kWidth;
  auto a = calls(s,
                 RotateArgs{.x = s.input<bf16>({kTokens, kHeads, width}),
                            .positions = s.numbers<int32_t>({kTokens}, 0, kPositions - 1),
                            .rope = rope(s),
                            .out = s.output<bf16>({kTokens, kHeads, width})},
                 rotate);
  if (quantized) {
    a->out.dtype = DType::kE4m3;
    a->scales = s.output<float>({kTokens, kHeads, 1});
  }
  damage_rope(s, a->rope);
  s.damages(a->x, a->positions, a->out, a->scales, a->scale, a->target);
  return a;
}

std::shared_ptr<void> make_rope_table(Subject& s) {
  auto a = calls(
      s, RopeTableArgs{.factor = 4, .original = 64, .table = s.output<float>({kPositions, 2, 32})},
      rope_table);
  s.damages(a->theta, a->factor, a->original, a->beta_fast, a->beta_slow, unpinned(a->table, 1),
            a->target);
  return a;
}

PrepareQueryArgs query_args(Subject& s) {
  return {.q = s.input<bf16>({kTokens, kHeads, kWidth}),
          .norm = norm_of(s, kWidth),
          .positions = s.numbers<int32_t>({kTokens}, 0, kPositions - 1),
          .rope = rope(s),
          .out = s.output<bf16>({kTokens, kHeads, kWidth})};
}
void damage_query(Subject& s, PrepareQueryArgs& a) {
  damage_norm(s, a.norm);
  damage_rope(s, a.rope);
  s.damages(a.q, a.positions, a.out);
}
std::shared_ptr<void> make_prepare_query(Subject& s) {
  auto a = calls(s, query_args(s), prepare_query);
  damage_query(s, *a);
  s.damages(a->target);
  return a;
}

IndexQueryArgs index_args(Subject& s) {
  IndexQueryArgs a{.q = s.input<bf16>({kTokens, kHeads, 128}),
                   .weights = s.input<float>({kTokens, kHeads}),
                   .positions = s.numbers<int32_t>({kTokens}, 0, kPositions - 1),
                   .rope = rope(s),
                   .hadamard = testing::draw(s.rng(), 0, 1) == 1,
                   .out = s.output<bf16>({kTokens, kHeads, 128}),
                   .out_weights = s.output<float>({kTokens, kHeads})};
  if (testing::draw(s.rng(), 0, 1)) a.out.dtype = DType::kE4m3;
  return a;
}
void damage_index(Subject& s, IndexQueryArgs& a) {
  damage_rope(s, a.rope);
  s.damages(a.q, a.weights, a.positions, a.scale, a.factor, a.out, a.out_weights);
}
std::shared_ptr<void> make_index_query(Subject& s) {
  auto a = calls(s, index_args(s), index_query);
  damage_index(s, *a);
  s.damages(a->target);
  return a;
}

std::shared_ptr<void> make_prepare_queries(Subject& s) {
  auto a =
      calls(s, PrepareQueriesArgs{.query = query_args(s), .index = index_args(s)}, prepare_queries);
  damage_query(s, a->query);
  damage_index(s, a->index);
  s.damages(a->target);
  return a;
}

std::shared_ptr<void> make_compress(Subject& s) {
  constexpr int64_t kValues = 2 * 128;  // an overlapping compressor of index keys
  CompressArgs args{.rows = s.input<float>({kTokens, 2 * kValues}),
                    .positions = s.numbers<int32_t>({kTokens}, 0, kPositions - 1),
                    .requests = s.numbers<int32_t>({kTokens}, 0, kRows - 1),
                    .ratio = 2,
                    .overlap = true,
                    .bias = s.input<float>({2, kValues}),
                    .norm = norm_of(s, 128),
                    .rope = rope(s),
                    .hadamard = testing::draw(s.rng(), 0, 1) == 1,
                    .slots = s.numbers<int64_t>({kTokens}, -1, kPages * kPage - 1),
                    .cache = s.cache(CacheFormat::kIndexKeys, kPages, kPage, true),
                    .latent = s.output<bf16>({kTokens, 128})};
  args.state = {.rows = s.output<float>({kPages, 4, 2 * kValues}),
                .table = s.numbers<int32_t>({kRows, 3}, 0, kPages - 1),
                .ring = testing::draw(s.rng(), 0, 1) == 1};
  auto a = calls(s, args, compress);
  damage_norm(s, a->norm);
  damage_rope(s, a->rope);
  s.damages(a->rows, a->positions, a->requests, a->ratio, a->bias, unpinned(a->state.rows, 3),
            unpinned(a->state.table, 3), a->slots, a->cache, a->scale, a->latent, a->target);
  return a;
}

WriteArgs prologue_args(Subject& s) {
  WriteArgs a{.kv = s.input<bf16>({kTokens, 128}),
              .slots = s.numbers<int64_t>({kTokens}, -1, kPages * kPage - 1),
              .cache = s.cache(CacheFormat::kIndexKeys, kPages, kPage, true)};
  a.prologue.norm = norm_of(s, 128);
  a.prologue.rope = rope(s);
  a.prologue.positions = s.numbers<int32_t>({kTokens}, 0, kPositions - 1);
  a.prologue.hadamard = testing::draw(s.rng(), 0, 1);
  return a;
}
void damage_prologue(Subject& s, WriteArgs& a) {
  damage_norm(s, a.prologue.norm);
  damage_rope(s, a.prologue.rope);
  s.damages(unpinned(a.kv, 1), a.slots, a.cache, a.scale, a.prologue.positions);
}
std::shared_ptr<void> make_prologue(Subject& s) {
  auto a = calls(s, prologue_args(s), write);
  damage_prologue(s, *a);
  s.damages(a->target);
  return a;
}

std::shared_ptr<void> make_norm_write(Subject& s) {
  auto a =
      calls(s, NormWriteArgs{.norm = norm_args(s), .write = {prologue_args(s), prologue_args(s)}},
            norm_write);
  damage_norms(s, a->norm);
  damage_prologue(s, a->write[0]);
  damage_prologue(s, a->write[1]);
  s.damages(a->target);
  return a;
}

const testing::Verb kVerbs[] = {
    {"norm", {"norm"}, make_norm},
    {"rotate", {"rotate"}, make_rotate},
    {"rope_table", {"rope_table"}, make_rope_table},
    {"prepare_query", {"prepare_query"}, make_prepare_query},
    {"index_query", {"index_query"}, make_index_query},
    {"compress", {"compress"}, make_compress},
    {"write_prologue", {"write"}, make_prologue},
    {"norm_write", {"norm_write", "norm", "write"}, make_norm_write},
    {"prepare_queries", {"prepare_queries", "prepare_query", "index_query"}, make_prepare_queries},
};

class Hostile : public ::testing::TestWithParam<testing::Verb> {};

TEST_P(Hostile, ErrorsOrSuccessAndNothingElse) { testing::sweep(GetParam()); }

INSTANTIATE_TEST_SUITE_P(Layers, Hostile, ::testing::ValuesIn(kVerbs),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace winnow
