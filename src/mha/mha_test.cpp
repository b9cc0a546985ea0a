// attend_mha: every kernel x every case against fp64 sums over std::set, and against plain causal
// attention where that is what it must be.
#include <cmath>
#include <limits>
#include <map>
#include <set>

#include "accuracy.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/mha.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;
using testing::normal;
constexpr float kInf = std::numeric_limits<float>::infinity();

struct Case {
  std::string name;
  int64_t tokens, heads, rows, d_qk, d_v;
  int64_t topk = -1;     // -1: no ids
  bool similar = false;  // neighbouring tokens choose nearly the same keys
  bool starts = false, lengths = false, mask = false, bias = false, sink = false;
  bool shared_keys = false;  // stride 0 over heads
  bool strided = false;
  float scale = 0.1f;
  bool bits = false;
};

std::vector<Case> cases() {
  return {
      {.name = "all_keys", .tokens = 5, .heads = 3, .rows = 70, .d_qk = 192, .d_v = 128},
      {"causal", 37, 2, 37, 192, 128, -1, false, false, true},
      {"sparse", 19, 2, 300, 192, 128, 40},
      {"sparse_similar", 35, 2, 300, 192, 128, 90, true, false, true, false, false, true},
      {"requests", 20, 3, 200, 64, 48, 30, false, true, true, false, false, true},
      {"mask", 18, 2, 90, 24, 40, 60, false, true, true, true},
      {"mask_without_ids", 18, 2, 90, 24, 40, -1, false, true, true, true},
      {"bias", 17, 2, 90, 24, 40, 60, true, false, true, false, true, true},
      {"bias_and_mask", 9, 4, 130, 33, 17, -1, false, false, true, true, true},
      {"odd_sizes", 3, 5, 67, 7, 5, 50},
      {"ones", 1, 1, 1, 1, 1, 1},
      {"wide", 2, 1, 40, 1024, 1024, 30},
      {"shared_keys", 6, 4, 80, 96, 64, 50, false, false, false, false, false, true, true},
      {"strided", 18, 3, 80, 40, 24, 50, false, true, true, true, true, true, false, true},
      {"no_ids", 3, 2, 50, 16, 16, 0, false, false, false, false, false, true},
      {"no_rows", 3, 2, 0, 16, 16, 10},
      {"no_tokens", 0, 2, 50, 16, 16, 10},
      // Keys of 192 and values of 128 over ranges have a kernel of their own on Hopper.
      {"causal_tiles", 150, 2, 200, 192, 128, -1, false, false, true},
      {"ranges", 140, 1, 150, 192, 128, -1, false, true, true, false, false, true},
      {.name = "bits",
       .tokens = 140,
       .heads = 2,
       .rows = 333,
       .d_qk = 192,
       .d_v = 128,
       .lengths = true,
       .sink = true,
       .scale = -0.1f,
       .bits = true},
      {.name = "bits_ranges",
       .tokens = 20,
       .heads = 9,
       .rows = 90,
       .d_qk = 192,
       .d_v = 128,
       .starts = true,
       .bits = true},
      {.name = "bits_and_ids",
       .tokens = 9,
       .heads = 2,
       .rows = 90,
       .d_qk = 24,
       .d_v = 40,
       .topk = 60,
       .bits = true},
      // And so have sets of them, whose bits it holds for 4,096 rows at a time.
      {"sets_ranges", 140, 2, 300, 192, 128, 70, false, true, true},
      {"sets_odd_heads", 131, 3, 100, 192, 128, 77, false, false, true, false, false, true},
      {"sets_chunks", 130, 4, 8300, 192, 128, 48, false, true, false, false, false, true, true,
       false, -0.1f},
      {"sets_eight_heads", 2100, 8, 4140, 192, 128, 6, false, false, true, false, false, true,
       true},
      {"sets_mask", 20, 9, 150, 192, 128, -1, false, true, true, true},
      {"sets_mask_chunks", 3, 2, 4200, 192, 128, -1, false, false, false, true, false, false, true,
       false, 0.1f, true},
      {"sets_mask_and_bits", 40, 4, 190, 192, 128, 150, false, true, true, true, false, true, false,
       false, 0.1f, true},
      {"sets_none", 3, 4, 50, 192, 128, 0, false, false, false, false, false, true},
      {"sets_huge_logits", 5, 4, 70, 192, 128, 60, false, true, true, true, false, true, false,
       false, 1e30f},
      {"dense_huge_logits", 5, 2, 70, 192, 128, -1, false, false, true, false, false, true, false,
       false, 1e30f},
      {"dense_scale_zero", 5, 2, 70, 192, 128, -1, false, false, true, false, false, false, false,
       false, 0.0f},
      {"scale_negative", 4, 2, 50, 16, 16, 30, false, false, false, false, false, true, false,
       false, -0.3f},
      {"scale_zero", 4, 2, 50, 16, 16, 30, false, false, false, false, false, false, false, false,
       0.0f},
      {"huge_logits", 4, 2, 50, 16, 16, 30, false, false, false, false, false, false, false, false,
       1e30f},
  };
}

struct Problem {
  Case c;
  int64_t gap, kv_heads, width;
  Guarded<bf16> q, k, v;
  Guarded<int32_t> ids, starts, lengths;
  Guarded<uint8_t> mask, bits;
  Guarded<float> bias, sink;

  explicit Problem(const Case& c_)
      : c(c_),
        gap(c.strided ? 3 : 0),
        kv_heads(c.shared_keys ? 1 : c.heads),
        width(std::max<int64_t>(c.rows - 5, 0)),
        q(c.tokens * c.heads * (c.d_qk + gap), 0xff),
        k(c.rows * kv_heads * (c.d_qk + gap), 0xff),
        v(c.rows * kv_heads * (c.d_v + gap), 0xff),
        ids(c.tokens * std::max<int64_t>(c.topk, 0)),
        starts(c.tokens),
        lengths(c.tokens),
        mask(c.tokens * width),
        bits(c.tokens * (width / 8)),
        bias(c.tokens * width),
        sink(c.heads) {
    testing::Rng rng(c.tokens * 17 + c.rows);
    const auto fill = [&](Guarded<bf16>& x, int64_t d) {
      for (size_t i = 0; i < x.size(); ++i)
        if (static_cast<int64_t>(i) % (d + gap) < d) x[i] = to_bf16(normal(rng));
    };
    fill(q, c.d_qk);
    fill(k, c.d_qk);
    fill(v, c.d_v);
    for (int64_t t = 0; t < c.tokens; ++t) {
      // Two requests, the second from row 30 on; some tokens have no valid row at all.
      const int32_t hostile_starts[] = {INT32_MIN, -20, INT32_MAX};
      starts[t] = t % 9 == 8 ? hostile_starts[t / 9 % 3] : t >= c.tokens / 2 ? 30 : 0;
      const int64_t length = c.starts ? t * 4 : c.rows - c.tokens + t + 1;
      lengths[t] = static_cast<int32_t>(t % 11 == 10 ? -2 : t % 7 == 6 ? INT32_MAX : length);
      const auto bad = testing::hostile(c.rows);
      for (int64_t i = 0; i < c.topk; ++i) {
        int64_t id = c.rows > 0 ? draw(rng, 0, c.rows - 1) : 0;
        if (c.similar) id = draw(rng, 0, 19) ? i * 3 % c.rows : id;
        if (draw(rng, 0, 9) == 0) id = bad[draw(rng, 0, bad.size() - 1)];
        ids[t * c.topk + i] = static_cast<int32_t>(id);
      }
    }
    for (uint8_t& m : mask) m = static_cast<uint8_t>(draw(rng, 0, 2) * 7);
    for (uint8_t& b : bits) b = static_cast<uint8_t>(draw(rng, 0, 255));
    for (float& b : bias) b = draw(rng, 0, 5) == 0 ? -kInf : normal(rng);
    const float sinks[] = {0.5f, -kInf, kInf, 2.0f};
    for (int64_t h = 0; h < c.heads; ++h) sink[h] = sinks[h % 4];
  }

  MhaArgs args() {
    const auto view = [&](Guarded<bf16>& x, int64_t n, int64_t heads, int64_t d) {
      return tensor(x.data(), {n, c.heads, d}, {heads * (d + gap), heads > 1 ? d + gap : 0, 1});
    };
    MhaArgs a{.q = tensor(q.data(), {c.tokens, c.heads, c.d_qk},
                          {c.heads * (c.d_qk + gap), c.d_qk + gap, 1}),
              .k = view(k, c.rows, kv_heads, c.d_qk),
              .v = view(v, c.rows, kv_heads, c.d_v),
              .scale = c.scale};
    if (c.topk >= 0) a.ids = tensor(ids.data(), {c.tokens, c.topk});
    if (c.starts) a.starts = tensor(starts.data(), {c.tokens});
    if (c.lengths) a.lengths = tensor(lengths.data(), {c.tokens});
    if (c.mask) a.mask = tensor(mask.data(), {c.tokens, width});
    if (c.bits) a.bits = tensor(bits.data(), {c.tokens, width / 8});
    if (c.bias) a.bias = tensor(bias.data(), {c.tokens, width});
    if (c.sink) a.sink = tensor(sink.data(), {c.heads});
    return a;
  }

  // The contract, spelled out: rows of a token's set, with what is added to their logits.
  std::map<int64_t, float> rows_of(int64_t t) const {
    const int64_t start = c.starts ? starts[t] : 0;
    const int64_t length = c.lengths ? lengths[t] : c.rows - start;
    std::set<int64_t> chosen;
    if (c.topk < 0)
      for (int64_t id = std::max<int64_t>(-start, 0); id < std::min(length, c.rows - start); ++id)
        chosen.insert(id);
    for (int64_t i = 0; i < c.topk; ++i) chosen.insert(ids[t * c.topk + i]);
    std::map<int64_t, float> rows;
    for (const int64_t id : chosen) {
      if (id < 0 || id >= length || start + id < 0 || start + id >= c.rows) continue;
      if (c.mask && (id >= width || mask[t * width + id] == 0)) continue;
      if (c.bits && (id >= width / 8 * 8 || !(bits[t * (width / 8) + id / 8] >> id % 8 & 1)))
        continue;
      const float b = c.bias && id < width ? bias[t * width + id] : 0.0f;
      if (b != -kInf) rows[start + id] = b;
    }
    return rows;
  }

  // magnitude: sum_j p_j |v_j|, see tools/accuracy.h.
  void expected(std::vector<float>& out, std::vector<float>& lse,
                std::vector<float>& magnitude) const {
    for (int64_t t = 0; t < c.tokens; ++t) {
      const std::map<int64_t, float> rows = rows_of(t);
      for (int64_t h = 0; h < c.heads; ++h) {
        const int64_t kh = h % kv_heads;
        std::vector<double> s, o(c.d_v), m(c.d_v);
        double max = -1e300, sum = 0;
        for (const auto& [r, b] : rows) {
          double dot = 0;
          for (int64_t d = 0; d < c.d_qk; ++d)
            dot += double{to_float(q[(t * c.heads + h) * (c.d_qk + gap) + d])} *
                   to_float(k[(r * kv_heads + kh) * (c.d_qk + gap) + d]);
          s.push_back(c.scale * dot + b);
          max = std::max(max, s.back());
        }
        size_t i = 0;
        for (const auto& [r, b] : rows) {
          const double w = std::exp(s[i++] - max);
          sum += w;
          for (int64_t d = 0; d < c.d_v; ++d) {
            const double x = w * to_float(v[(r * kv_heads + kh) * (c.d_v + gap) + d]);
            o[d] += x;
            m[d] += std::fabs(x);
          }
        }
        double factor = sum > 0 ? 1 / sum : 0;
        const double all = max + std::log(sum);
        if (c.sink && sum > 0) factor /= 1 + std::exp(sink[h] - all);
        for (const double x : o) out.push_back(static_cast<float>(x * factor));
        for (const double x : m) magnitude.push_back(static_cast<float>(x * factor));
        lse.push_back(sum > 0 ? static_cast<float>(all) : kInf);
      }
    }
  }
};

class MhaTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {};

TEST_P(MhaTest, MatchesTheFormula) {
  const auto& [kernel, c] = GetParam();
  if (const std::string why = testing::why_not("mha", kernel); !why.empty()) GTEST_SKIP() << why;
  Problem p(c);
  const int64_t row = c.d_v + p.gap;
  Guarded<bf16> out(c.tokens * c.heads * row);
  Guarded<float> lse(c.tokens * c.heads);
  MhaArgs a = p.args();
  a.out = tensor(out.data(), {c.tokens, c.heads, c.d_v}, {c.heads * row, row, 1});
  a.lse = tensor(lse.data(), {c.tokens, c.heads});
  a.target = testing::target("mha", kernel);
  attend_mha(a);
  ASSERT_TRUE(testing::device_finished());
  std::vector<float> want, want_lse, magnitude;
  p.expected(want, want_lse, magnitude);
  const tools::Deviation d =
      tools::compare(a.out, tensor(want.data(), {c.tokens, c.heads, c.d_v}), tools::kPrefillOut,
                     tensor(magnitude.data(), {c.tokens, c.heads, c.d_v}));
  EXPECT_TRUE(d.ok) << "out: " << d.text(a.out);
  const tools::Deviation l =
      tools::compare(a.lse, tensor(want_lse.data(), {c.tokens, c.heads}), tools::kPrefillLse);
  EXPECT_TRUE(l.ok) << "lse: " << l.text(a.lse);

  // The same bits again; and -inf where the switch requests it.
  const std::vector<float> before = lse.values();
  a.empty_lse_negative = true;
  attend_mha(a);
  ASSERT_TRUE(testing::device_finished());
  for (size_t i = 0; i < before.size(); ++i)
    EXPECT_EQ(lse[i], std::isinf(want_lse[i]) ? -kInf : before[i]);
}

INSTANTIATE_TEST_SUITE_P(Kernels, MhaTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("mha")),
                                            ::testing::ValuesIn(cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

class MhaProperties : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("mha", GetParam()); !why.empty())
      GTEST_SKIP() << why;
  }
};

// A top-k as wide as the sequence, in any order and with repetitions, is causal attention, bit for
// bit: only the set counts.
void expect_causal(const Case& c, const std::string& kernel) {
  Problem p(c);
  for (int64_t t = 0; t < c.tokens; ++t) {
    p.lengths[t] = static_cast<int32_t>(c.rows - c.tokens + t + 1);
    for (int64_t i = 0; i < c.topk; ++i)
      p.ids[t * c.topk + i] = static_cast<int32_t>((i * 7 + t) % c.rows);
  }
  Guarded<bf16> sparse(c.tokens * c.heads * c.d_v), plain(c.tokens * c.heads * c.d_v);
  MhaArgs a = p.args();
  a.target = testing::target("mha", kernel);
  a.out = tensor(sparse.data(), {c.tokens, c.heads, c.d_v});
  attend_mha(a);
  a.ids = {};
  a.out = tensor(plain.data(), {c.tokens, c.heads, c.d_v});
  attend_mha(a);
  ASSERT_TRUE(testing::device_finished());
  for (size_t i = 0; i < plain.size(); ++i) ASSERT_EQ(sparse[i].bits, plain[i].bits) << i;
}
TEST_P(MhaProperties, WholeSequenceIsCausal) {
  expect_causal({"", 40, 2, 40, 64, 32, 60, false, false, true}, GetParam());
  expect_causal({"", 140, 2, 150, 192, 128, 190, false, false, true}, GetParam());
  expect_causal({"", 2, 2, 4180, 192, 128, 4200, false, false, true}, GetParam());
}

// The result of a problem of one head.
void attend_into(Guarded<bf16>& out, Problem& p, const std::string& kernel) {
  MhaArgs a = p.args();
  a.target = testing::target("mha", kernel);
  a.out = tensor(out.data(), {p.c.tokens, 1, p.c.d_v});
  attend_mha(a);
  ASSERT_TRUE(testing::device_finished());
}

// A NaN in a row that is not chosen stays there; in a chosen one it reaches the result.
TEST_P(MhaProperties, NanStaysWhereItIs) {
  for (const Case& c : {Case{"", 20, 1, 90, 32, 32, 20}, Case{"", 20, 1, 90, 192, 128, 20}}) {
    Problem p(c);
    for (int64_t d = 0; d < c.d_qk; ++d) p.k[50 * c.d_qk + d] = {0x7fc0};
    for (int64_t d = 0; d < c.d_v; ++d) p.v[50 * c.d_v + d] = {0x7fc0};
    for (int32_t& id : p.ids) id = id == 50 ? 51 : id;
    p.ids[3 * c.topk] = p.ids[3 * c.topk + 7] = 50;
    std::vector<float> want, lse, magnitude;
    p.expected(want, lse, magnitude);
    Guarded<bf16> out(c.tokens * c.d_v);
    attend_into(out, p, GetParam());
    for (int64_t t = 0; t < c.tokens; ++t)
      EXPECT_EQ(std::isnan(to_float(out[t * c.d_v])), t == 3) << "token " << t;
    for (int64_t i = 0; i < c.tokens * c.d_v; ++i) {
      if (i / c.d_v == 3) continue;
      EXPECT_NEAR(to_float(out[i]), want[i], 0.01f + 0.01f * std::fabs(want[i])) << i;
    }
  }
}

// Infinite values, some chosen, in a context of several chunks, of which the slow path of Hopper's
// kernel holds 65,536 rows at a time.
TEST_P(MhaProperties, FarRows) {
  constexpr int64_t kRows = 66000, kKey = 192, kValue = 128, kIds = 2760;
  Guarded<bf16> q(2 * kKey), k(kRows * kKey, 0), v(kRows * kValue, 0), out(2 * kValue);
  for (bf16& x : q) x = to_bf16(1.0f);
  v[20 * kValue] = v[5000 * kValue] = to_bf16(kInf);
  v[5 * kValue + 1] = to_bf16(3.0f);
  v[12288 * kValue + 1] = to_bf16(6.0f);
  v[65900 * kValue + 1] = to_bf16(9.0f);
  v[65950 * kValue + 1] = to_bf16(12.0f);
  const int32_t rows[2][4] = {{65900, 5, 12288, INT32_MIN},  // the mean of 9, 3 and 6
                              {65950, 5000, 20, 66000}};     // and of 12, 0 and 0
  Guarded<int32_t> ids(2 * kIds);
  for (int64_t i = 0; i < 2 * kIds; ++i) ids[i] = rows[i / kIds][i % 7 % 4];
  MhaArgs a{.q = tensor(q.data(), {2, 1, kKey}),
            .k = tensor(k.data(), {kRows, 1, kKey}),
            .v = tensor(v.data(), {kRows, 1, kValue}),
            .ids = tensor(ids.data(), {2, kIds}),
            .scale = 1,
            .out = tensor(out.data(), {2, 1, kValue}),
            .target = testing::target("mha", GetParam())};
  attend_mha(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_EQ(to_float(out[0]), 0.0f);
  EXPECT_NEAR(to_float(out[1]), 6.0f, 0.05f);
  EXPECT_EQ(to_float(out[kValue]), kInf);
  EXPECT_NEAR(to_float(out[kValue + 1]), 4.0f, 0.05f);
}

// The same for ranges of keys: values that only later tokens see.
TEST_P(MhaProperties, NanBehindTheRangeStaysThere) {
  const Case c{"", 70, 1, 70, 192, 128, -1, false, false, true};
  Problem p(c);
  for (int32_t t = 0; t < 70; ++t) p.lengths[t] = t + 1;
  for (int64_t d = 0; d < 128; ++d)
    p.v[66 * 128 + d] = {static_cast<uint16_t>(d % 2 ? 0x7f80 : 0x7fc0)};
  p.k[68 * 192] = {0x7fc0};
  Guarded<bf16> out(c.tokens * c.d_v);
  attend_into(out, p, GetParam());
  for (int64_t t = 0; t < c.tokens; ++t)
    EXPECT_EQ(std::isnan(to_float(out[t * c.d_v])), t >= 66) << "token " << t;
  for (int64_t t = 0; t < c.tokens; ++t)
    EXPECT_EQ(std::isfinite(to_float(out[t * c.d_v + 1])), t < 66) << "token " << t;
}

INSTANTIATE_TEST_SUITE_P(Kernels, MhaProperties, ::testing::ValuesIn(testing::kernels("mha")));

TEST(MhaErrors, NameTheArgument) {
  Problem p(cases()[0]);
  Guarded<bf16> out(5 * 3 * 128);
  Guarded<int32_t> ints(20);
  Guarded<float> floats(20);
  MhaArgs good = p.args();
  good.out = tensor(out.data(), {5, 3, 128});
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    MhaArgs a = good;
    change(a);
    testing::expect_error([&] { attend_mha(a); }, code, words);
  };
  expect([](MhaArgs& a) { a.q = {}; }, {"attend_mha", "q", "nothing"});
  expect([](MhaArgs& a) { a.q.dtype = DType::kF32; }, {"q", "bf16", "f32"});
  expect([](MhaArgs& a) { a.k.shape[1] = 2; }, {"k", "[any, 3, 192]", "[70, 2, 192]"});
  expect([](MhaArgs& a) { a.k.shape[2] = 191; }, {"k", "192", "191"});
  expect([](MhaArgs& a) { a.v.shape[0] = 69; }, {"v", "70", "69"});
  expect([](MhaArgs& a) { a.v.stride[2] = 2; }, {"v", "contiguous"});
  expect([&](MhaArgs& a) { a.ids = tensor(ints.data(), {4, 5}); }, {"ids", "[5, any]", "[4, 5]"});
  expect([&](MhaArgs& a) { a.starts = tensor(ints.data(), {4}); }, {"starts", "[5]", "[4]"});
  expect([&](MhaArgs& a) { a.lengths = tensor(floats.data(), {5}); }, {"lengths", "int32", "f32"});
  expect([&](MhaArgs& a) { a.mask = tensor(ints.data(), {5, 2}); }, {"mask", "uint8", "int32"});
  expect([&](MhaArgs& a) { a.bits = tensor(ints.data(), {5, 2}); }, {"bits", "uint8", "int32"});
  expect([&](MhaArgs& a) { a.bias = tensor(ints.data(), {5, 2}); }, {"bias", "f32", "int32"});
  expect([&](MhaArgs& a) { a.sink = tensor(floats.data(), {2}); }, {"sink", "[3]", "[2]"});
  expect([](MhaArgs& a) { a.scale = MhaArgs{}.scale; }, {"scale", "a number", "none"});
  expect([](MhaArgs& a) { a.out.shape[2] = 127; }, {"out", "128", "127"});
  expect([](MhaArgs& a) { a.out.stride[0] = 0; }, {"out", "overlap"});
  expect([&](MhaArgs& a) { a.lse = tensor(floats.data(), {5, 2}); }, {"lse", "[5, 3]", "[5, 2]"});
  expect([](MhaArgs& a) { a.target.kernel = "fastest"; }, {"mha", "no kernel fits", "reference"},
         ErrorCode::kUnsupported);
  for (const bf16 x : out) EXPECT_EQ(x.bits, 0xcdcd);  // nothing was written
}

}  // namespace
}  // namespace winnow
