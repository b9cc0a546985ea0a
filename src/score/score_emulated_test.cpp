// The logic of the AMX engine on a CPU without AMX: its source, over the emulated tiles, against
// the formula. The real instructions are tested by score_test wherever the CPU has them.
#include <cmath>
#include <vector>

#include "core/formats.h"
#include "cpu/isa.h"
#include "score/blocks.h"
#include "testing.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi")
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define WINNOW_EMULATE_AMX
#define amx emulated_amx
#include "score/score_amx.cpp"
#undef amx
#pragma GCC pop_options

namespace winnow::internal::score {
namespace {

class EmulatedTest : public ::testing::TestWithParam<int> {};

TEST_P(EmulatedTest, UnitsMatchTheFormula) {
  const cpu::Isa& cpu = cpu::isa();
  if (!cpu.avx512_bf16 || !cpu.avx512_vbmi)
    GTEST_SKIP() << testing::allowed_skip("this CPU has no AVX-512 BF16 and VBMI",
                                          testing::should_run("avx512bf16"));
  const int heads = GetParam();
  testing::Rng rng(heads);
  std::vector<uint8_t> q(heads * kDim), rows(kBlockKeys * kDim);
  for (uint8_t& x : q) x = to_e4m3(testing::normal(rng)).bits;
  for (uint8_t& x : rows) x = to_e4m3(testing::normal(rng) * 100).bits;
  std::vector<float> weights(heads);
  for (float& w : weights) w = testing::normal(rng);
  testing::Guarded<float> scales(kBlockKeys);
  for (float& s : scales) s = std::exp2(testing::normal(rng));

  Params p;
  p.q = q.data();
  p.q_head_stride = kDim;
  p.weights = weights.data();
  p.heads = heads;
  testing::Guarded<std::byte> query(bf16_query_bytes(heads)), keys(kBlockKeys * kKeyBytes);
  pack_bf16(p, 0, query.data());
  dequantize_bf16({.rows = rows.data(), .count = kBlockKeys}, keys.data());
  for (const int count : {1, 16, 17, 40, 64}) {
    testing::Guarded<float> out(kBlockKeys);
    block({query.data(), keys.data(), scales.data(), out.data(), heads, count});
    for (int j = 0; j < count; ++j) {
      double sum = 0, loss = 0;  // loss: score.h's bound
      for (int h = 0; h < heads; ++h) {
        double dot = 0, size = 0;
        for (int i = 0; i < kDim; ++i) {
          const double product = static_cast<double>(to_float(e4m3{q[h * kDim + i]})) *
                                 to_float(e4m3{rows[j * kDim + i]});
          dot += product;
          size += std::fabs(product);
        }
        sum += weights[h] * std::max(dot, 0.0);
        loss += std::fabs(weights[h]) * (128 * size + (heads + 2) * std::max(dot, 0.0));
      }
      ASSERT_LE(std::fabs(out[j] - scales[j] * sum), scales[j] * loss * 0x1p-24)
          << "key " << j << " of " << count << ": " << out[j] << ", expected " << scales[j] * sum;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Heads, EmulatedTest,
                         ::testing::Values(1, 8, 16, 17, 32, 33, 48, 64, 65, 80, 112, 128));

}  // namespace
}  // namespace winnow::internal::score
#endif
