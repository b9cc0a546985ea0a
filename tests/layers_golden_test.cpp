// The verbs around attention against golden vectors of Hugging Face models
// (tools/make_layer_golden.py). Inputs are bf16 values, outputs what the models give for them in
// fp32: a kernel differs by its own rounding alone. Every bound says where it comes from.
#include <algorithm>
#include <cmath>
#include <deque>

#include "core/formats.h"
#include "safetensors.h"
#include "testing.h"
#include "winnow/absorb.h"
#include "winnow/compress.h"
#include "winnow/index_query.h"
#include "winnow/norm.h"
#include "winnow/prepare_query.h"
#include "winnow/rotate.h"
#include "winnow/score.h"
#include "winnow/write.h"

namespace winnow {
namespace {

using testing::Guarded;
using tools::Safetensors;

constexpr double kBf16 = 0x1p-8;  // one rounding to bf16, relative

Safetensors golden(const char* name) {
  return Safetensors::read(std::string(WINNOW_TEST_DATA) + "/golden/layers/" + name +
                           ".safetensors");
}

template <class T>
Guarded<T> copy_of(const Tensor& t) {
  const auto* data = static_cast<const T*>(t.data);
  return Guarded<T>(std::vector<T>(data, data + t.size()));
}

// Tensors of a file where a device can read them.
class Copies {
 public:
  Tensor operator()(const Tensor& t) {
    kept_.push_back(copy_of<float>(t));
    Tensor copy = t;
    copy.data = kept_.back().data();
    return copy;
  }

 private:
  std::deque<Guarded<float>> kept_;
};

// |got - want| <= relative * |want| + absolute, element by element.
void expect_near(const bf16* got, const Tensor& want, double relative, double absolute,
                 const char* what) {
  const auto* values = static_cast<const float*>(want.data);
  for (int64_t i = 0; i < want.size(); ++i)
    ASSERT_LE(std::fabs(to_float(got[i]) - values[i]), relative * std::fabs(values[i]) + absolute)
        << what << ", value " << i << ": got " << to_float(got[i]) << ", expected " << values[i];
}

class LayersGolden : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("norm", GetParam()); !why.empty())
      GTEST_SKIP() << why;
  }
  Target target(const char* stage) const { return testing::target(stage, kernel_); }
  const std::string kernel_ = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Kernels, LayersGolden, ::testing::ValuesIn(testing::kernels("norm")),
                         [](const auto& info) { return info.param; });

// Both sides sum squares in fp32, width * 2^-24 each; then one rounding to bf16.
TEST_P(LayersGolden, Norm) {
  const Safetensors file = golden("norm");
  for (const std::string name : {"query", "kv", "heads", "key"}) {
    const Tensor& want = file.at(name + ".out");
    Guarded<bf16> x = copy_of<bf16>(file.at(name + ".x"));
    Guarded<bf16> out(x.size());
    const int64_t rows = want.shape[0], width = want.shape[1];
    Copies copied;
    Norm norm{.kind = name == "key" ? NormKind::kLayer : NormKind::kRms};
    if (name != "heads") norm.weight = copied(file.at(name + ".weight"));
    if (name == "key") norm.bias = copied(file.at(name + ".bias"));
    winnow::norm({.rows = {{.x = tensor(x.data(), {rows, width}),
                            .out = tensor(out.data(), {rows, width}),
                            .norm = norm}},
                  .target = target("norm")});
    ASSERT_TRUE(testing::device_finished());
    // LayerNorm: centred values of up to 4 lose 2^-24 of the mean 3, times 1.6 for the weight.
    const double absolute = name == "key" ? 128 * 0x1p-24 * 8 : 0;
    ASSERT_NO_FATAL_FAILURE(
        expect_near(out.data(), want, kBf16 + 2 * width * 0x1p-24, absolute, name.c_str()));
  }
}

struct Rotation {
  const char *x, *table, *out;
  Rope rope;
};

// Two products of magnitudes up to 5 in fp32 on both sides, then one rounding to bf16.
TEST_P(LayersGolden, Rotate) {
  const Safetensors file = golden("rotate");
  const Rotation rotations[] = {
      {"v4.x", "v4.main.table", "v4.main.out", {}},
      {"v4.x", "v4.main.table", "v4.main.inverse", {.inverse = true}},
      {"v4.x", "v4.compress.table", "v4.compress.out", {}},
      {"v4.x", "v4.compress.table", "v4.compress.inverse", {.inverse = true}},
      {"v32.query.x", "v32.table", "v32.query.out", {}},
      {"v32.index.x", "v32.table", "v32.index.out", {.pairs = RopePairs::kHalf}},
  };
  for (const Rotation& r : rotations) {
    const Tensor& want = file.at(r.out);
    Guarded<bf16> x = copy_of<bf16>(file.at(r.x));
    Guarded<int32_t> rows(want.shape[0]);  // row i of the file's table is position i of ours
    for (int64_t t = 0; t < want.shape[0]; ++t) rows[t] = static_cast<int32_t>(t);
    Copies copied;
    Rope rope = r.rope;
    rope.table = copied(file.at(r.table));
    const Tensor view = tensor(x.data(), {want.shape[0], want.shape[1], want.shape[2]});
    rotate({.x = view,
            .positions = tensor(rows.data(), {want.shape[0]}),
            .rope = rope,
            .out = view,
            .target = target("rotate")});
    ASSERT_TRUE(testing::device_finished());
    ASSERT_NO_FATAL_FAILURE(expect_near(x.data(), want, kBf16, 4 * 5 * 0x1p-24, r.out));
  }
}

// A model's frequency is off by a few units of 2^-24 (powers in fp32): the angle by position * f
// times that; cosine and sine by no more, and 2^-24 of rounding on both sides.
TEST(LayersGoldenTables, RopeTable) {
  const Safetensors file = golden("rotate");
  const auto* positions = static_cast<const int32_t*>(file.at("positions").data);
  struct Model {
    const char* table;
    RopeTableArgs args;
  };
  const Model models[] = {
      {"v4.main.table", {}},
      {"v4.compress.table", {.theta = 160000, .factor = 16, .original = 65536}},
      {"v32.table", {.factor = 40, .original = 4096}},
  };
  for (const Model& m : models) {
    Guarded<float> table(256 * 64);
    RopeTableArgs a = m.args;
    a.table = tensor(table.data(), {256, 2, 32});
    rope_table(a);
    const auto* want = static_cast<const float*>(file.at(m.table).data);
    for (int64_t t = 0; t < file.at(m.table).shape[0]; ++t)
      for (int64_t i = 0; i < 64; ++i) {
        const double angle = positions[t] * std::pow(a.theta, -(i % 32) / 32.0);
        ASSERT_NEAR(table[positions[t] * 64 + i], want[t * 64 + i], (8 * angle + 2) * 0x1p-24)
            << m.table << " position " << positions[t] << " column " << i;
      }
  }
}

// Sums of up to 128 weighted rows and of width squares in fp32 on both sides; the latent rounds to
// bf16. Rotated values round once more and take their share of both latents' roundings: at most
// |u| + |v| <= sqrt(2) * hypot(u, v), which the rotation keeps.
void check_compressor(const char* name, int32_t ratio, bool overlap, const Target& target) {
  const Safetensors file = golden(name);
  const Tensor& want = file.at("entries");
  const int64_t tokens = file.at("rows").shape[0], width = want.shape[1], entries = want.shape[0];
  const int64_t values = overlap ? 2 * width : width;
  Guarded<bf16> rows = copy_of<bf16>(file.at("rows")), bias_bits = copy_of<bf16>(file.at("bias"));
  Guarded<float> bias(bias_bits.size()), state(tokens * 2 * values);
  for (size_t i = 0; i < bias.size(); ++i) bias[i] = to_float(bias_bits[i]);
  Guarded<int32_t> positions(tokens), requests(tokens, 0), table(1, 0);
  for (int64_t t = 0; t < tokens; ++t) positions[t] = static_cast<int32_t>(t);
  Guarded<bf16> latent(tokens * width);
  Copies copied;
  compress({.rows = tensor(rows.data(), {tokens, 2 * values}),
            .positions = tensor(positions.data(), {tokens}),
            .requests = tensor(requests.data(), {tokens}),
            .ratio = ratio,
            .overlap = overlap,
            .bias = tensor(bias.data(), {ratio, values}),
            .state = {.rows = tensor(state.data(), {1, tokens, 2 * values}),
                      .table = tensor(table.data(), {1, 1})},
            .norm = {.weight = copied(file.at("weight"))},
            .latent = tensor(latent.data(), {tokens, width}),
            .target = target});
  ASSERT_TRUE(testing::device_finished());
  // The entries' own rotation, which records hide behind their quantiser.
  Guarded<bf16> closed(entries * width);
  Guarded<int32_t> starts(entries);
  for (int64_t w = 0; w < entries; ++w) {
    std::copy_n(latent.data() + ((w + 1) * ratio - 1) * width, width, closed.data() + w * width);
    starts[w] = static_cast<int32_t>(w * ratio);
  }
  const Tensor view = tensor(closed.data(), {entries, 1, width});
  rotate({.x = view,
          .positions = tensor(starts.data(), {entries}),
          .rope = {.table = copied(file.at("table"))},
          .out = view,
          .target = testing::target("rotate", target.kernel)});
  ASSERT_TRUE(testing::device_finished());
  const auto* expected = static_cast<const float*>(want.data);
  const double fp32 = static_cast<double>(width + 4 * ratio) * 0x1p-23;
  for (int64_t i = 0; i < want.size(); ++i) {
    const bool rotated = i % width >= width - kRopeDim;
    const double both = rotated ? std::hypot(expected[i], expected[i ^ 1]) : 0;
    const double bound =
        kBf16 * std::fabs(expected[i]) + (kBf16 + fp32) * std::sqrt(2.0) * both + fp32 * 5;
    ASSERT_LE(std::fabs(to_float(closed[i]) - expected[i]), bound)
        << name << ", entry " << i / width << " value " << i % width << ": got "
        << to_float(closed[i]) << ", expected " << expected[i];
  }
}

TEST_P(LayersGolden, CompressC4A) { check_compressor("compress_c4a", 4, true, target("compress")); }
TEST_P(LayersGolden, CompressC4AIndex) {
  check_compressor("compress_c4a_index", 4, true, target("compress"));
}
TEST_P(LayersGolden, CompressC128A) {
  check_compressor("compress_c128a", 128, false, target("compress"));
}

// Index queries in bf16: the file's are rounded once, ours too, from sums that differ by 2^-22 of
// magnitudes up to 5, so a value may fall on the other side of a tie: one unit of bf16.
TEST_P(LayersGolden, IndexQuery) {
  const Safetensors file = golden("index");
  const Tensor& want = file.at("rotated");
  const int64_t tokens = want.shape[0], heads = want.shape[1];
  Guarded<bf16> q = copy_of<bf16>(file.at("q")), weights = copy_of<bf16>(file.at("weights"));
  Guarded<bf16> out(q.size());
  Guarded<float> out_weights(weights.size());
  Guarded<int32_t> rows(tokens);
  for (int64_t t = 0; t < tokens; ++t) rows[t] = static_cast<int32_t>(t);
  const float factor = 1 / std::sqrt(static_cast<float>(heads) * 128);
  Copies copied;
  index_query({.q = tensor(q.data(), {tokens, heads, 128}),
               .weights = tensor(weights.data(), {tokens, heads}),
               .positions = tensor(rows.data(), {tokens}),
               .rope = {.table = copied(file.at("table"))},
               .factor = factor,
               .out = tensor(out.data(), {tokens, heads, 128}),
               .out_weights = tensor(out_weights.data(), {tokens, heads}),
               .target = target("index_query")});
  ASSERT_TRUE(testing::device_finished());
  expect_near(out.data(), want, 2 * kBf16, 20 * 0x1p-24, "rotated");
  for (size_t i = 0; i < weights.size(); ++i)
    ASSERT_EQ(out_weights[i], to_float(weights[i]) * 1 * factor) << i;
}

// The model's logits over index keys in bf16. Both sides add 128 products and then the heads in
// fp32, ours within score.h's bound: (128 + heads + 2) * 2^-24 of the terms' magnitudes, the model
// within as much again. Ids are the model's wherever no two logits lie closer than that.
TEST(LayersGoldenScores, IndexKeysInBf16) {
  const Safetensors file = golden("index");
  const Tensor& want = file.at("logits");
  const int64_t tokens = want.shape[0], keys = want.shape[1], heads = file.at("q").shape[1];
  const auto* turned = static_cast<const float*>(file.at("rotated").data);
  Guarded<bf16> q(tokens * heads * 128), entries = copy_of<bf16>(file.at("keys"));
  for (size_t i = 0; i < q.size(); ++i) q[i] = to_bf16(turned[i]);
  Guarded<bf16> raw = copy_of<bf16>(file.at("weights"));
  Guarded<float> weights(tokens * heads), logits(tokens * keys);
  const float factor = 1 / std::sqrt(static_cast<float>(heads) * 128);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = to_float(raw[i]) * factor;
  Guarded<int64_t> slots(keys);
  for (int64_t j = 0; j < keys; ++j) slots[j] = (keys - 1 - j) / 8 * 8 + j % 8;  // pages reversed
  Guarded<std::byte> memory(page_bytes(CacheFormat::kIndexKeysBf16, 8) * keys / 8);
  const Cache cache{memory.data(), CacheFormat::kIndexKeysBf16, keys / 8, 8};
  Guarded<int32_t> table(std::vector<int32_t>{2, 1, 0}), requests(tokens, 0), ends(tokens);
  for (int64_t t = 0; t < tokens; ++t) ends[t] = static_cast<int32_t>(keys);
  constexpr int64_t kTop = 7;
  Guarded<int32_t> ids(tokens * kTop);
  const auto* expected = static_cast<const float*>(want.data);
  for (const std::string kernel : {"simd", "reference"}) {
    int64_t without_tie = 0;
    write({.kv = tensor(entries.data(), {keys, 128}),
           .slots = tensor(slots.data(), {keys}),
           .cache = cache,
           .target = {.kernel = kernel.c_str()}});
    ScoreArgs a{.q = tensor(q.data(), {tokens, heads, 128}),
                .weights = tensor(weights.data(), {tokens, heads}),
                .keys = cache,
                .block_table = tensor(table.data(), {1, 3}),
                .requests = tensor(requests.data(), {tokens}),
                .ends = tensor(ends.data(), {tokens}),
                .logits = tensor(logits.data(), {tokens, keys}),
                .target = {.kernel = kernel.c_str()}};
    score(a);
    a.logits = {};
    score_select({.score = a, .ids = tensor(ids.data(), {tokens, kTop})});
    for (int64_t t = 0; t < tokens; ++t) {
      double bound = 0;
      for (int64_t j = 0; j < keys; ++j) {
        double size = 0;
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t i = 0; i < 128; ++i)
            size += std::fabs(weights[t * heads + h] * to_float(q[(t * heads + h) * 128 + i]) *
                              to_float(entries[j * 128 + i]));
        bound = std::max(bound, 2 * (128 + heads + 2) * 0x1p-24 * size);
        ASSERT_NEAR(logits[t * keys + j], expected[t * keys + j], bound)
            << kernel << " token " << t;
      }
      std::vector<int32_t> order(keys);
      for (int64_t j = 0; j < keys; ++j) order[j] = static_cast<int32_t>(j);
      const float* row = expected + t * keys;
      std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return row[a] > row[b]; });
      // What lies further above the last one picked than logits may differ must be picked, and
      // nothing further below it may be: without a tie there, these are the model's ids.
      const float last = row[order[kTop - 1]];
      const std::vector<int32_t> got(ids.data() + t * kTop, ids.data() + (t + 1) * kTop);
      for (const int32_t id : got) EXPECT_GE(row[id], last - 2 * bound) << kernel << " token " << t;
      for (const int32_t id : order) {
        if (row[id] <= last + 2 * bound) continue;
        EXPECT_TRUE(std::binary_search(got.begin(), got.end(), id)) << kernel << " token " << t;
      }
      if (last - row[order[kTop]] <= 2 * bound) continue;
      ++without_tie;
      std::sort(order.begin(), order.begin() + kTop);
      EXPECT_TRUE(std::equal(got.begin(), got.end(), order.begin())) << kernel << " token " << t;
    }
    EXPECT_GE(without_tie, tokens / 2) << kernel;
  }
}

// project_output() is V4's grouped projection where a head is a group and the weight a view: 1,024
// products in fp32 on both sides, then one rounding to bf16.
TEST(LayersGoldenGroups, ProjectOutput) {
  const Safetensors file = golden("output_groups");
  const Tensor& want = file.at("out");
  const int64_t tokens = want.shape[0], groups = want.shape[1], rank = want.shape[2];
  const int64_t depth = file.at("x").shape[2];
  Guarded<bf16> x = copy_of<bf16>(file.at("x")), weight = copy_of<bf16>(file.at("weight"));
  for (const std::string& kernel : testing::cpu_kernels("absorb")) {
    Guarded<bf16> out(want.size());
    project_output({.attn = tensor(x.data(), {tokens, groups, depth}),
                    .w_uv = tensor(weight.data(), {depth, groups, rank}, {1, rank * depth, depth}),
                    .out = tensor(out.data(), {tokens, groups, rank}),
                    .target = {.kernel = kernel.c_str()}});
    // Terms are products of about 1 and 1/32: their magnitudes sum to less than 32.
    ASSERT_NO_FATAL_FAILURE(
        expect_near(out.data(), want, kBf16, 2 * depth * 32 * 0x1p-24, kernel.c_str()));
  }
}

}  // namespace
}  // namespace winnow
