// compress: every kernel x every compressor. Latents against the formula in double, records against
// rotate() and write() of the latents, and the same bytes for any cutting of the streams.
#include "winnow/compress.h"

#include <cstring>
#include <limits>

#include "compress/compress_problem.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using namespace internal::compress;
using testing::draw;

class CompressTest : public ::testing::TestWithParam<std::tuple<std::string, Case>> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("compress", kernel()); !why.empty())
      GTEST_SKIP() << why;
  }
  const std::string& kernel() const { return std::get<0>(GetParam()); }
  const Case& of() const { return std::get<1>(GetParam()); }
};

INSTANTIATE_TEST_SUITE_P(Kernels, CompressTest,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("compress")),
                                            ::testing::ValuesIn(internal::compress::cases())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });

// The latent of request r's entry w: value and bound, by the formula in double.
void expect_latent(const Problem& p, int64_t r, int64_t w, const bf16* got) {
  const Case& c = p.c;
  const int64_t d = c.width(), first = (w - c.overlap) * c.ratio, last = (w + 1) * c.ratio;
  const double u = 0x1p-24;
  std::vector<double> pooled(d), error(d);
  double squares = 0, moved = 0;
  for (int64_t i = 0; i < d; ++i) {
    double largest = -INFINITY, whole = 0, sum = 0, magnitude = 0, spread = 0;
    const auto at = [&](int64_t j) {
      const int64_t part = c.overlap && j >= w * c.ratio ? d : 0;
      return std::pair{p.rows[r].data() + j * p.columns + part + i,
                       p.bias.data() + j % c.ratio * c.values() + part + i};
    };
    const auto score = [&](int64_t j) {  // fp32, as the contract has it
      return c.gate ? at(j).first[c.values()] + (c.bias ? *at(j).second : 0.0f) : 0.0f;
    };
    for (int64_t j = std::max<int64_t>(first, 0); j < last; ++j)
      largest = std::max<double>(largest, score(j));
    for (int64_t j = std::max<int64_t>(first, 0); j < last; ++j) {
      const double weight = std::exp(score(j) - largest);
      whole += weight;
      sum += weight * *at(j).first;
      magnitude += weight * std::fabs(*at(j).first);
      spread = std::max(spread, weight * (largest - score(j)));
    }
    pooled[i] = sum / whole;
    // A weight is off by 4 u and by u of its exponent; both sums by u a row, the quotient by 3 u.
    const double rows = static_cast<double>(last - first);
    error[i] = magnitude / whole * (2 * rows + 12 + 2 * spread) * u;
    squares += pooled[i] * pooled[i];
    moved += std::fabs(pooled[i]) * error[i];
  }
  const double inverse = 1 / std::sqrt(squares / d + c.eps);
  for (int64_t i = 0; i < d; ++i) {
    const double want = pooled[i] * inverse * p.weight[i];
    // The norm's own fp32 error, d * u of the sum of squares and a few u, and what the errors of
    // the pooled values do to it; then bf16, 2^-8.
    const double fp32 = std::fabs(want) * ((d + 8) * u + moved / squares) +
                        error[i] * inverse * std::fabs(p.weight[i]);
    const double bound = fp32 + (std::fabs(want) + fp32) * 0x1p-8;
    ASSERT_LE(std::fabs(to_float(got[i]) - want), bound)
        << "request " << r << " entry " << w << " value " << i << ": got " << to_float(got[i])
        << ", expected " << want;
  }
}

TEST_P(CompressTest, LatentsMatchTheFormula) {
  Problem p(of());
  Memory m(p, StateKind::kPaged);
  const std::vector<Token> tokens = p.whole();
  Step step(p, m, tokens);
  const auto count = static_cast<int64_t>(tokens.size());
  Guarded<bf16> latent(count * p.c.width());
  step.args.latent = tensor(latent.data(), {count, p.c.width()});
  step.args.target = testing::target("compress", kernel());
  compress(step.args);
  ASSERT_TRUE(testing::device_finished());
  for (int64_t t = 0; t < count; ++t) {
    const auto& [request, position] = tokens[t];
    const bf16* row = latent.data() + t * p.c.width();
    if ((position + 1) % p.c.ratio == 0)
      ASSERT_NO_FATAL_FAILURE(expect_latent(p, request, position / p.c.ratio, row));
    else
      for (int64_t i = 0; i < p.c.width(); ++i) ASSERT_EQ(row[i].bits, 0xcdcd) << "token " << t;
  }
}

// The records are those of rotate() and write() on the latents.
TEST_P(CompressTest, IsTheCompositionOfItsSteps) {
  Problem p(of());
  if (p.c.hadamard) return;  // no verb of its own: index_query's test has it
  Memory m(p, StateKind::kPaged), want(p, StateKind::kPaged);
  const std::vector<Token> tokens = p.whole();
  const auto count = static_cast<int64_t>(tokens.size());
  run(p, m, tokens, kernel());
  Step step(p, want, tokens);
  Guarded<bf16> latent(count * p.c.width(), 0);
  step.args.latent = tensor(latent.data(), {count, p.c.width()});
  step.args.cache = {};
  step.args.target = testing::target("compress", kernel());
  compress(step.args);
  ASSERT_TRUE(testing::device_finished());
  for (int32_t& position : step.positions) position -= p.c.ratio - 1;
  // By the CPU: of the names there is no more than one for a device.
  const bool on_cpu = step.args.target.device.kind == DeviceKind::kCpu;
  const Target target = on_cpu ? Target{.kernel = step.args.target.kernel} : Target{};
  const Tensor rows = tensor(latent.data(), {count, 1, p.c.width()});
  rotate({.x = rows,
          .positions = step.args.positions,
          .rope = step.args.rope,
          .out = rows,
          .target = target});
  write({.kv = tensor(latent.data(), {count, p.c.width()}),
         .slots = step.args.slots,
         .cache = {want.cache.data(), p.c.format, want.pages, p.c.page},
         .target = target});
  ASSERT_EQ(m.cache.values(), want.cache.values());
}

// Requests advance by random chunks in one batch, in random order.
std::vector<std::vector<Token>> cut(const Problem& p, testing::Rng& rng, int64_t longest) {
  std::vector<std::vector<Token>> steps;
  std::vector<int32_t> done(p.rows.size(), 0);
  while (true) {
    std::vector<Token> tokens;
    for (size_t r = 0; r < done.size(); ++r) {
      const int64_t left = p.c.lengths[r] - done[r];
      const int64_t n = std::min(left, draw(rng, 0, longest));
      for (int64_t i = 0; i < n; ++i) tokens.push_back({static_cast<int32_t>(r), done[r]++});
      if (draw(rng, 0, 3) == 0) tokens.push_back({0, -1});  // padding
    }
    bool all = true;
    for (size_t r = 0; r < done.size(); ++r) all = all && done[r] == p.c.lengths[r];
    steps.push_back(tokens);
    if (all) return steps;
  }
}

TEST_P(CompressTest, AnyChunkingGivesTheSameBytes) {
  Problem p(of());
  Memory whole(p, StateKind::kPaged);
  run(p, whole, p.whole(), kernel());
  testing::Rng rng(7);
  // Rings of the shortest length, and longer ones, which a device's decodes find rows in otherwise.
  const std::pair<StateKind, int32_t> kinds[] = {
      {StateKind::kPaged, 0}, {StateKind::kRing, 0}, {StateKind::kRing, 5}};
  for (const auto& [kind, drafts] : kinds)
    for (const int64_t longest : {1, 3, 7, 200}) {
      Memory m(p, kind, drafts);
      m.has_table = drafts == 0 || longest != 1;
      for (const auto& tokens : cut(p, rng, longest)) run(p, m, tokens, kernel());
      ASSERT_EQ(m.cache.values(), whole.cache.values())
          << (kind == StateKind::kRing ? "ring" : "paged") << ", drafts " << drafts
          << ", chunks up to " << longest;
      if (kind == StateKind::kPaged) {
        ASSERT_EQ(std::memcmp(m.state.data(), whole.state.data(), m.state.size() * sizeof(float)),
                  0);
      }
    }
}

// A decode in which `requests` requests close an entry at once.
void close_entries_at_once(const Case& of, int requests, const std::string& kernel) {
  Case c = of;
  c.lengths.assign(requests, c.ratio);
  Problem p(c);
  Memory whole(p, StateKind::kPaged);
  run(p, whole, p.whole(), kernel);
  std::vector<Token> before, last;
  for (const Token& token : p.whole())
    (token.position + 1 < c.ratio ? before : last).push_back(token);
  const std::pair<StateKind, int32_t> kinds[] = {
      {StateKind::kPaged, 0}, {StateKind::kRing, 0}, {StateKind::kRing, 1}};
  for (const auto& [kind, drafts] : kinds) {
    Memory m(p, kind, drafts);
    if (!before.empty()) run(p, m, before, kernel);
    run(p, m, last, kernel);
    ASSERT_EQ(m.cache.values(), whole.cache.values())
        << (kind == StateKind::kRing ? "ring" : "paged") << ", drafts " << drafts;
    if (kind == StateKind::kPaged) {
      ASSERT_EQ(std::memcmp(m.state.data(), whole.state.data(), m.state.size() * sizeof(float)), 0);
    }
  }
}

// A device cuts C128A's entries by their number, in four ways. The CPU's kernels have one way.
TEST_P(CompressTest, ManyRequestsCloseEntriesAtOnce) {
  const bool on_device = kernel() == "sm90";
  for (const int requests : on_device ? std::vector{2, 20, 40, 55, 64, 70} : std::vector{9}) {
    SCOPED_TRACE(requests);
    ASSERT_NO_FATAL_FAILURE(close_entries_at_once(of(), requests, kernel()));
  }
}

// Drafts of garbage run ahead; the next step starts at the first one that is rejected.
TEST_P(CompressTest, RejectedDraftsLeaveNoTrace) {
  constexpr int32_t kDrafts = 3;
  Problem p(of());
  Memory whole(p, StateKind::kPaged);
  run(p, whole, p.whole(), kernel());
  testing::Rng rng(11);
  for (const StateKind kind : {StateKind::kPaged, StateKind::kRing}) {
    Memory m(p, kind, kDrafts);
    for (size_t r = 0; r < p.rows.size(); ++r)
      for (int32_t at = 0; at < p.c.lengths[r];) {
        // One sure token and drafts, of which the first `good` are right.
        const auto n = static_cast<int32_t>(std::min<int64_t>(kDrafts + 1, p.c.lengths[r] - at));
        const auto good = static_cast<int32_t>(draw(rng, 1, n));
        std::vector<Token> tokens;
        std::vector<float> rows = p.draw_rows(rng, n);
        for (int32_t i = 0; i < n; ++i) {
          tokens.push_back({static_cast<int32_t>(r), at + i});
          if (i < good)
            std::copy_n(p.rows[r].data() + (at + i) * p.columns, p.columns,
                        rows.data() + i * p.columns);
        }
        run(p, m, tokens, kernel(), &rows);
        at += good;
      }
    ASSERT_EQ(m.cache.values(), whole.cache.values()) << (kind == StateKind::kRing);
  }
}

TEST_P(CompressTest, HostileValuesTouchNothing) {
  Problem p(of());
  for (const StateKind kind : {StateKind::kPaged, StateKind::kRing}) {
    Memory m(p, kind);
    run(p, m, p.whole(), kernel());
    const auto state = m.state.values();
    const auto cache = m.cache.values();
    std::vector<Token> tokens;
    for (const int32_t bad : testing::hostile(p.rows.size())) tokens.push_back({bad, 0});
    for (const int32_t bad : {INT32_MIN, -2, -1}) tokens.push_back({0, bad});
    if (kind == StateKind::kPaged)
      for (const int32_t bad : {INT32_MAX, INT32_MAX - 1}) tokens.push_back({0, bad});
    if (p.c.ratio > 1 || p.c.gate) run(p, m, tokens, kernel());
    const auto bytes = [](const auto& v) {
      const auto* begin = reinterpret_cast<const uint8_t*>(v.data());
      return std::vector<uint8_t>(begin, begin + v.size() * sizeof(v[0]));
    };
    ASSERT_EQ(bytes(m.state.values()), bytes(state));
    ASSERT_EQ(m.cache.values(), cache);
    // Blocks outside the state: no rows, and no entries that need them.
    const auto bad = testing::hostile(m.blocks);
    for (size_t i = 0; i < m.table.size(); ++i) m.table[i] = bad[i % bad.size()];
    if (p.c.window() == 1) continue;
    run(p, m, {{0, p.c.window() - 1}}, kernel());
    ASSERT_EQ(bytes(m.state.values()), bytes(state));
    ASSERT_EQ(m.cache.values(), cache);
  }
}

// A score that is NaN, wherever it stands in the window, makes its entry NaN, and no other.
TEST(CompressOnCpu, NanScoresStay) {
  for (const Case& c : internal::compress::cases()) {
    if (!c.gate || c.overlap || c.bf16_rows || c.lengths[0] < 2 * c.ratio) continue;
    for (const int32_t at : {0, c.ratio - 1})
      for (const char* kernel : {"simd", "reference"}) {
        Problem p(c);
        p.rows[0][at * p.columns + c.width()] = std::numeric_limits<float>::quiet_NaN();
        Memory m(p, StateKind::kPaged);
        Step step(p, m, p.whole());
        Guarded<bf16> latent(step.slots.size() * c.width());
        step.args.latent =
            tensor(latent.data(), {static_cast<int64_t>(step.slots.size()), c.width()});
        step.args.target.kernel = kernel;
        compress(step.args);
        const auto entry = [&](int64_t token) { return latent.data() + token * c.width(); };
        for (int64_t i = 0; i < c.width(); ++i) {
          ASSERT_TRUE(std::isnan(to_float(entry(c.ratio - 1)[i]))) << c.name << kernel << i;
          ASSERT_FALSE(std::isnan(to_float(entry(2 * c.ratio - 1)[i]))) << c.name << kernel << i;
        }
      }
  }
}

// An entry whose place in the table of RoPE is missing is not stored; its row is.
TEST_P(CompressTest, PositionsBehindTheTable) {
  Problem p(of());
  if (p.c.lengths[0] < 2 * p.c.ratio) return;
  Memory m(p, StateKind::kPaged);
  const auto untouched = m.cache.values();
  Step step(p, m, p.whole());
  step.args.rope.table.shape[0] = 0;
  step.args.target = testing::target("compress", kernel());
  for (void* const data : {step.args.rope.table.data, static_cast<void*>(nullptr)}) {
    step.args.rope.table.data = data;
    compress(step.args);
    ASSERT_TRUE(testing::device_finished());
    ASSERT_EQ(m.cache.values(), untouched) << data;
  }
}

TEST(CompressErrors, NameTheArgument) {
  Problem p(internal::compress::cases()[0]);
  Memory m(p, StateKind::kPaged);
  Step step(p, m, p.whole());
  Guarded<bf16> latent(36 * 512);
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    CompressArgs a = step.args;
    change(a);
    testing::expect_error([&] { compress(a); }, code, words);
  };
  expect([](CompressArgs& a) { a.rows = {}; }, {"compress", "rows", "nothing"});
  expect([](CompressArgs& a) { a.rows.dtype = DType::kI32; }, {"rows", "f32", "int32"});
  expect([](CompressArgs& a) { a.rows.shape[0] = 35; }, {"rows", "at least 36", "35"});
  expect([](CompressArgs& a) { a.rows.shape[1] = 2047; }, {"rows", "4 x d columns", "2047"});
  expect([](CompressArgs& a) { a.rows.stride[1] = 2; }, {"rows", "contiguous"});
  expect([](CompressArgs& a) { a.positions = {}; }, {"positions", "nothing"});
  expect([](CompressArgs& a) { a.requests = {}; }, {"requests", "nothing"});
  expect([](CompressArgs& a) { a.ratio = 0; }, {"ratio", "1 to 128", "found 0"});
  expect([](CompressArgs& a) { a.ratio = 129; }, {"ratio", "129"});
  expect([](CompressArgs& a) { a.gate = false; }, {"gate", "ratio 1", "ratio 4"});
  expect([](CompressArgs& a) { a.bias.shape[0] = 3; }, {"bias", "[4, 1024]", "[3, 1024]"});
  expect([](CompressArgs& a) { a.state = {}; }, {"state.rows", "nothing"});
  expect([](CompressArgs& a) { a.state.rows.shape[2] = 512; }, {"state.rows", "2048", "512"});
  expect([](CompressArgs& a) { a.state.rows.stride[0] = 0; }, {"state.rows", "overlap"});
  expect([](CompressArgs& a) { a.state.table = {}; }, {"state.table", "ring", "neither"});
  expect([](CompressArgs& a) { a.state.ring = true; }, {"state.rows.shape[1]", "7", "found 4"});
  expect([](CompressArgs& a) { a.norm.weight.shape[0] = 128; }, {"norm.weight", "512", "128"});
  expect([](CompressArgs& a) { a.norm.eps = -1; }, {"norm.eps"});
  expect([](CompressArgs& a) { a.rope.table.shape[1] = 1; }, {"rope.table", "2, 32"});
  expect([](CompressArgs& a) { a.hadamard = true; }, {"hadamard", "128", "512"});
  expect([](CompressArgs& a) { a.cache = {}; }, {"cache", "latent", "neither"});
  expect([](CompressArgs& a) { a.cache.format = CacheFormat::kIndexKeys; }, {"cache", "512"});
  expect([](CompressArgs& a) { a.scale = ScaleMode::kAmax; }, {"scale", "v4_fp8"});
  expect([](CompressArgs& a) { a.slots = {}; }, {"slots", "nothing"});
  expect(
      [&](CompressArgs& a) {
        a.latent = tensor(latent.data(), {36, 128});
      },
      {"latent", "512", "128"});
  expect([](CompressArgs& a) { a.target.kernel = "fastest"; }, {"compress", "no kernel fits"},
         ErrorCode::kUnsupported);
  step.slots[5] = m.pages * p.c.page;
  expect([](CompressArgs&) {}, {"slots", "below", "at token 5"});
  for (const std::byte b : m.cache) ASSERT_EQ(b, std::byte{0xcd});  // nothing was written
  for (const float v : m.state) ASSERT_TRUE(std::isnan(v));
}

}  // namespace
}  // namespace winnow
