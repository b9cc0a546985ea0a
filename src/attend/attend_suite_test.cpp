// Contents as FlashMLA's prefill suite draws them: rows and queries of deviation 0.1 around a
// common offset, lists without repetitions, lengths from none to all, sinks of which a third is
// -inf and a third +inf. Results are held to that suite's bars alone. Lists of two and three keys,
// which its decode suite has among others, are cases of their own.
//
// On CUDA everything lies in the device's own memory. Other tests use mapped memory, from which
// rows arrive so late that a kernel which reads a row too late never meets the next one.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "attend/attend_problem.h"

namespace winnow {
namespace {

using internal::attend::kInf;
using internal::attend::kValueDim;
using testing::DeviceWorkspace;
using testing::draw;
using testing::normal;

struct Suite {
  const char* name;
  CacheFormat format;
  int64_t heads;
  // On a device. 62 tokens of 64 heads leave the decode kernel about one CTA a multiprocessor.
  int64_t tokens = 62;
  int64_t width = 512;
  // -1 behind a list's end instead of lengths.
  bool padded = false;
  // Ids by a block table instead of slots.
  bool logical = false;
  // Lists of two and three keys, with rows of deviation 0.2. One weight is then about the output's
  // size: rounded to bf16 it would miss the bar of every tenth token, and with 0.1 that of one
  // element in 30 million.
  bool few_keys = false;
};
void PrintTo(const Suite& suite, std::ostream* out) { *out << suite.name; }

const Suite kSuites[] = {
    {"v32_bf16_h64", CacheFormat::kV32Bf16, 64},
    {"v32_bf16_h20", CacheFormat::kV32Bf16, 20},
    {"v4_bf16_h64", CacheFormat::kV4Bf16, 64},
    {"v4_bf16_h128", CacheFormat::kV4Bf16, 128},
    {"v32_fp8_h64", CacheFormat::kV32Fp8, 64},
    // Tokens whose CTA, or whose two, are helped by others: by one or two helpers, which have two
    // parts or more. (decode_cuts_test looks whether they are.)
    {"v32_fp8_h128_helped", CacheFormat::kV32Fp8, 128, 36, 1600},
    {"v32_fp8_h128_helped_long", CacheFormat::kV32Fp8, 128, 38, 1600, false, true},
    {"v32_fp8_h64_helped", CacheFormat::kV32Fp8, 64, 68, 2048, true},
    {"v32_fp8_h128_helped_wide", CacheFormat::kV32Fp8, 128, 40, 2048, true, true},
    {"v32_fp8_h128_two_mains", CacheFormat::kV32Fp8, 128, 24, 2048},
    {"v32_fp8_h100_two_mains", CacheFormat::kV32Fp8, 100, 28, 2048, true, true},
    {"v32_fp8_h64_two_mains", CacheFormat::kV32Fp8, 64, 50, 2048, true},
    // A full wave, then what is after it with helpers.
    {"v32_fp8_h128_helped_behind", CacheFormat::kV32Fp8, 128, 100, 2048},
    {"v4_fp8_h64", CacheFormat::kV4Fp8, 64},
    {"v4_fp8_h20", CacheFormat::kV4Fp8, 20},
    {.name = "v4_fp8_h128_few", .format = CacheFormat::kV4Fp8, .heads = 128, .few_keys = true},
    {.name = "v4_fp8_h20_few", .format = CacheFormat::kV4Fp8, .heads = 20, .few_keys = true},
};

// A copy of `values` where `device` reads fastest.
template <class T>
std::unique_ptr<DeviceWorkspace> placed(const Device& device, const std::vector<T>& values) {
  auto memory = std::make_unique<DeviceWorkspace>(device, values.size() * sizeof(T));
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    cudaMemcpy(memory->data(), values.data(), memory->size(), cudaMemcpyHostToDevice);
    return memory;
  }
#endif
  std::memcpy(memory->data(), values.data(), memory->size());
  return memory;
}
template <class T>
std::vector<T> fetched([[maybe_unused]] const Device& device, const DeviceWorkspace& memory) {
  std::vector<T> values(memory.size() / sizeof(T));
#ifdef WINNOW_WITH_CUDA
  if (device.kind == DeviceKind::kCuda) {
    cudaMemcpy(values.data(), memory.data(), memory.size(), cudaMemcpyDeviceToHost);
    return values;
  }
#endif
  std::memcpy(values.data(), memory.data(), memory.size());
  return values;
}

class SuiteCall {
 public:
  static constexpr int32_t kRows = 2048;
  static constexpr float kScale = 0.5f;
  const int64_t tokens;
  const int64_t heads;
  const int64_t width;
  const int64_t d;

  SuiteCall(const Suite& suite, const Target& target, int64_t tokens_, uint64_t seed)
      : tokens(tokens_),
        heads(suite.heads),
        width(suite.width),
        d(internal::attend::model_of_format(suite.format).d_qk),
        model_(internal::attend::model_of_format(suite.format)),
        target_(target),
        rng_(seed),
        q_(around_an_offset(tokens * heads * d, 0.1f)),
        kv_(kRows * d),
        indices_(tokens * width),
        lengths_(tokens),
        sink_(heads) {
    std::vector<int32_t> rows(kRows);
    std::iota(rows.begin(), rows.end(), 0);
    for (int64_t t = 0; t < tokens; ++t) {
      std::shuffle(rows.begin(), rows.end(), rng_);
      std::copy_n(rows.begin(), width, indices_.begin() + t * width);
      lengths_[t] = static_cast<int32_t>(suite.few_keys ? draw(rng_, 2, 3) : draw(rng_, 0, width));
      if (suite.padded)
        std::fill(indices_.begin() + t * width + lengths_[t], indices_.begin() + (t + 1) * width,
                  -1);
    }
    for (float& x : sink_) {
      x = normal(rng_);
      const float kind = normal(rng_);
      if (kind < -0.5f) x = -kInf;
      if (kind > 0.5f) x = kInf;
    }
    const Device& device = target.device;
    const float deviation = suite.few_keys ? 0.2f : 0.1f;
    memory_ = {placed(device, q_),       placed(device, records(suite.format, deviation)),
               placed(device, indices_), placed(device, lengths_),
               placed(device, sink_),    placed(device, std::vector<int32_t>(tokens))};
    out_ = std::make_unique<DeviceWorkspace>(device, tokens * heads * kValueDim * sizeof(bf16));
    lse_ = std::make_unique<DeviceWorkspace>(device, tokens * heads * sizeof(float));
    max_ = std::make_unique<DeviceWorkspace>(device, tokens * heads * sizeof(float));
    args_.q = {memory_[0]->data(), DType::kBf16, 3, {tokens, heads, d}, {heads * d, d, 1}};
    args_.lists[0].cache = {memory_[1]->data(), suite.format, 1, kRows,
                            page_bytes(suite.format, kRows)};
    args_.lists[0].indices = tensor(static_cast<int32_t*>(memory_[2]->data()), {tokens, width});
    if (!suite.padded)
      args_.lists[0].lengths = tensor(static_cast<int32_t*>(memory_[3]->data()), {tokens});
    // One page: its number and every token's request are 0.
    auto* const zeros = static_cast<int32_t*>(memory_[5]->data());
    if (suite.logical) {
      args_.lists[0].block_table = tensor(zeros, {1, 1});
      args_.requests = tensor(zeros, {tokens});
    }
    args_.sink = tensor(static_cast<float*>(memory_[4]->data()), {heads});
    args_.scale = kScale;
    args_.out = tensor(static_cast<bf16*>(out_->data()), {tokens, heads, kValueDim});
    args_.lse = tensor(static_cast<float*>(lse_->data()), {tokens, heads});
    args_.max_logit = tensor(static_cast<float*>(max_->data()), {tokens, heads});
    args_.target = target;
  }

  void run() { internal::attend::attend_with_workspace(args_); }
  // Every output of the call.
  struct Results {
    std::vector<bf16> out;
    std::vector<float> lse, max_logit;
    bool operator==(const Results& other) const {
      const auto same = [](const auto& a, const auto& b) {
        return std::memcmp(a.data(), b.data(), a.size() * sizeof a[0]) == 0;
      };
      return same(out, other.out) && same(lse, other.lse) && same(max_logit, other.max_logit);
    }
  };
  Results results() const {
    return {fetched<bf16>(target_.device, *out_), fetched<float>(target_.device, *lse_),
            fetched<float>(target_.device, *max_)};
  }

  // Rows 0, `every`, 2 * `every`, ... of all tokens' heads against fp64.
  void expect_within_bars(int64_t every) const {
    Results got = results();
    for (int64_t row = 0; row < tokens * heads; row += every) {
      const int64_t t = row / heads;
      const int64_t h = row % heads;
      std::vector<float> want(kValueDim);
      float want_lse = 0;
      float want_max = 0;
      const double magnitude = expected(t, h, want, want_lse, want_max);
      const auto check = [&](const char* what, auto* x, float* y, int64_t n,
                             const tools::Bar& bar) {
        const Tensor here = tensor(x, {n});
        const tools::Deviation found = tools::compare(here, tensor(y, {n}), bar);
        ASSERT_TRUE(found.ok) << what << " of token " << t << " with " << lengths_[t]
                              << " entries, head " << h << ": " << found.text(here);
      };
      // The cosine is one of the whole output; single rows may be nearly zero.
      check("out", got.out.data() + row * kValueDim, want.data(), kValueDim,
            {tools::kPrefillOut.absolute, tools::kPrefillOut.relative});
      // Of fp8 keys a logit may be off by 2^-10 of its terms' magnitudes (attend.h); no lse is
      // farther off than the worst of its logits.
      tools::Bar bar = tools::kPrefillLse;
      if (args_.lists[0].cache.format != model_.bf16) bar.absolute += 0x1p-10 * magnitude;
      check("lse", &got.lse[row], &want_lse, 1, bar);
      check("max_logit", &got.max_logit[row], &want_max, 1, bar);
    }
  }

 private:
  std::vector<bf16> around_an_offset(int64_t count, float deviation) {
    const float offset = std::uniform_real_distribution<float>(-0.05f, 0.05f)(rng_);
    std::vector<bf16> values(count);
    for (bf16& x : values) x = to_bf16(to_float(to_bf16(normal(rng_) * deviation)) + offset);
    return values;
  }

  // A page with all rows; kv_ gets their values.
  std::vector<uint8_t> records(CacheFormat format, float deviation) {
    std::vector<bf16> rows = around_an_offset(kRows * d, deviation);
    std::vector<int64_t> slots(kRows);
    std::iota(slots.begin(), slots.end(), 0);
    std::vector<uint8_t> page(page_bytes(format, kRows));
    const auto stride = static_cast<int64_t>(page.size());
    write({.kv = tensor(rows.data(), {kRows, d}),
           .slots = tensor(slots.data(), {kRows}),
           .cache = {page.data(), format, 1, kRows, stride},
           .target = {.kernel = "reference"}});
    const internal::attend::ListView view{.page = kRows,
                                          .data = reinterpret_cast<const std::byte*>(page.data()),
                                          .page_stride = stride,
                                          .format = format};
    for (int32_t row = 0; row < kRows; ++row)
      internal::attend::dequantize(view, {0, row}, kv_.data() + row * d);
    return page;
  }

  // Gives the largest sum of magnitudes that a logit is of.
  double expected(int64_t t, int64_t h, std::vector<float>& out, float& lse,
                  float& max_logit) const {
    const bf16* const query = q_.data() + (t * heads + h) * d;
    const auto row = [&](int64_t k) { return kv_.data() + indices_[t * width + k] * d; };
    const int64_t count = lengths_[t];
    std::vector<double> s(count);
    std::vector<double> sums(kValueDim);
    double max = -kInf;
    double sum = 0;
    double magnitude = 0;
    for (int64_t k = 0; k < count; ++k) {
      double terms = 0;
      for (int64_t j = 0; j < d; ++j) {
        const double term = static_cast<double>(to_float(query[j])) * row(k)[j];
        s[k] += term;
        terms += std::fabs(term);
      }
      s[k] *= kScale;
      max = std::max(max, s[k]);
      magnitude = std::max(magnitude, kScale * terms);
    }
    for (int64_t k = 0; k < count; ++k) {
      const double p = std::exp(s[k] - max);
      sum += p;
      for (int64_t j = 0; j < kValueDim; ++j) sums[j] += p * row(k)[j];
    }
    max_logit = static_cast<float>(max);
    lse = count == 0 ? kInf : static_cast<float>(max + std::log(sum));
    const double factor = count == 0 ? 0 : 1 / (sum + std::exp(sink_[h] - max));
    for (int64_t j = 0; j < kValueDim; ++j) out[j] = static_cast<float>(sums[j] * factor);
    return magnitude;
  }

  const Model& model_;
  Target target_;
  testing::Rng rng_;
  std::vector<bf16> q_;
  std::vector<float> kv_;
  std::vector<int32_t> indices_, lengths_;
  std::vector<float> sink_;
  std::array<std::unique_ptr<DeviceWorkspace>, 6> memory_;
  std::unique_ptr<DeviceWorkspace> out_, lse_, max_;
  AttendArgs args_;
};

class AttendSuite : public ::testing::TestWithParam<std::tuple<std::string, Suite>> {};

// Again and again the same bits: what a kernel reads must not depend on how fast rows arrive.
TEST_P(AttendSuite, StaysWithinThePeersBars) {
  const auto& [kernel, suite] = GetParam();
  if (const std::string why = testing::why_not("attend", kernel); !why.empty()) GTEST_SKIP() << why;
  const Target target = testing::target("attend", kernel);
  const bool on_device = target.device.kind == DeviceKind::kCuda;
  const int64_t tokens = on_device ? suite.tokens : 2;
  const uint64_t seeds = on_device ? 2 : 1;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    SuiteCall call(suite, target, tokens, seed);
    try {
      call.run();
    } catch (const Error& e) {
      const char* reason = internal::attend::may_leave_out(kernel);
      if (kernel.starts_with("sm90/wide") &&
          internal::attend::model_of_format(suite.format).fp8 == suite.format)
        reason = "not bf16";
      // Its errors are not those of this suite.
      if (internal::attend::precision_of(kernel) == Precision::kFp8) reason = "kFp8 alone";
      if (e.code() != ErrorCode::kUnsupported || !reason || !std::strstr(e.what(), reason)) throw;
      GTEST_SKIP() << e.what();
    }
    // On a device other heads of each token: 19 divides no case's number of heads.
    call.expect_within_bars(on_device && !suite.few_keys ? 19 : 1);
    const SuiteCall::Results first = call.results();
    for (int again = 0; again < (on_device ? 15 : 1); ++again) {
      call.run();
      ASSERT_TRUE(call.results() == first) << "seed " << seed << ", run " << again;
    }
  }
}

std::string name_of(const ::testing::TestParamInfo<AttendSuite::ParamType>& info) {
  return testing::label(std::get<0>(info.param)) + "_" + std::get<1>(info.param).name;
}
INSTANTIATE_TEST_SUITE_P(Kernels, AttendSuite,
                         ::testing::Combine(::testing::ValuesIn(testing::kernels("attend")),
                                            ::testing::ValuesIn(kSuites)),
                         name_of);
INSTANTIATE_TEST_SUITE_P(Members, AttendSuite,
                         ::testing::Combine(::testing::ValuesIn(testing::members("attend")),
                                            ::testing::ValuesIn(kSuites)),
                         name_of);

}  // namespace
}  // namespace winnow
