// Each roof is the best of many samples of a millisecond or two, all workers at once: short enough
// that some fall between the neighbours' turns on a busy machine.
#include "roofs.h"

#include <algorithm>
#include <chrono>
#include <memory>

#include "cpu/isa.h"
#include "cpu/threads.h"

namespace winnow::bench {

namespace {

using Clock = std::chrono::steady_clock;
constexpr int kSamples = 60;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// FLOP/s of a unit on all workers.
class Arithmetic {
 public:
  explicit Arithmetic(double (*unit)(int64_t) noexcept) : unit_(unit) {
    for (;; rounds_ *= 2) {  // until they take a millisecond on one worker
      const auto start = Clock::now();
      unit(rounds_);
      if (seconds_since(start) > 0.001) break;
    }
  }
  double sample() const {
    const int64_t workers = internal::cpu::threads();
    std::unique_ptr<double[]> flops(new double[workers]);
    const auto start = Clock::now();
    internal::cpu::parallel_for(workers, [&](int64_t w, int) { flops[w] = unit_(rounds_); });
    const double seconds = seconds_since(start);
    double sum = 0;
    for (int64_t w = 0; w < workers; ++w) sum += flops[w];
    return sum / seconds;
  }
  double best() const {
    double best = 0;
    for (int i = 0; i < kSamples; ++i) best = std::max(best, sample());
    return best;
  }

 private:
  double (*unit_)(int64_t) noexcept;
  int64_t rounds_ = 1000;
};

// Made when it is first asked for; null where the machine has no such unit.
const Arithmetic* arithmetic(double Roofs::*unit) {
#if defined(__x86_64__)
  const internal::cpu::Isa& isa = internal::cpu::isa();
  if (unit == &Roofs::amx && isa.amx_bf16) {
    static const Arithmetic amx(matrix_amx);
    return &amx;
  }
  if (unit == &Roofs::bf16_dot && isa.avx512_bf16) {
    static const Arithmetic dot(bf16_dot_avx512bf16);
    return &dot;
  }
#endif
  if (unit != &Roofs::fma) return nullptr;
#if defined(__x86_64__)
  static const Arithmetic fma(isa.avx512 ? fma_avx512 : isa.avx2 ? fma_avx2 : fma_portable);
#else
  static const Arithmetic fma(fma_portable);
#endif
  return &fma;
}

uint64_t sum_of(const uint64_t* data, int64_t count) {
  uint64_t s[8] = {};
  for (int64_t i = 0; i + 8 <= count; i += 8)
    for (int k = 0; k < 8; ++k) s[k] += data[i + k];
  return s[0] + s[1] + s[2] + s[3] + s[4] + s[5] + s[6] + s[7];
}

// B/s read from a buffer that the caches cannot hold, in stretches that keep every worker busy.
double read_bandwidth() {
  constexpr int64_t kStretch = int64_t{1} << 16;  // words: 512 KiB
  const int64_t bytes = std::max<int64_t>(int64_t{256} << 20, 2 * cache_bytes());
  const int64_t stretches = bytes / 8 / kStretch;
  std::unique_ptr<uint64_t[]> data(new uint64_t[stretches * kStretch]);
  internal::cpu::parallel_for(stretches, [&](int64_t i, int) {
    std::fill_n(data.get() + i * kStretch, kStretch, static_cast<uint64_t>(i));
  });
  // A sample reads the next quarter, which the three before it have pushed out of the caches.
  const int64_t quarter = stretches / 4;
  std::unique_ptr<uint64_t[]> sums(new uint64_t[stretches]);
  double best = 0;
  for (int i = 0; i < kSamples; ++i) {
    const int64_t first = i % 4 * quarter;
    const auto start = Clock::now();
    internal::cpu::parallel_for(quarter, [&](int64_t s, int) {
      sums[s] = sum_of(data.get() + (first + s) * kStretch, kStretch);
    });
    best = std::max(best, static_cast<double>(quarter * kStretch * 8) / seconds_since(start));
    volatile uint64_t sink = sums[0];  // keeps the sums, and so the reads, alive
    (void)sink;
  }
  return best;
}

}  // namespace

double fma_portable(int64_t rounds) noexcept {
  constexpr int kLanes = 64;
  float x[kLanes];
  for (int i = 0; i < kLanes; ++i) x[i] = static_cast<float>(i);
  for (int64_t r = 0; r < rounds; ++r)
    for (int i = 0; i < kLanes; ++i) x[i] = x[i] * 0.99f + 0.01f;
  volatile float sink = x[rounds % kLanes];
  (void)sink;
  return 2.0 * kLanes * static_cast<double>(rounds);
}

double Roofs::*unit_of(const std::string& kernel) {
  if (kernel.find("amx") != std::string::npos) return &Roofs::amx;
  if (kernel.find("bf16") != std::string::npos) return &Roofs::bf16_dot;
  if (kernel.find("sm90") != std::string::npos) return &Roofs::tensor;
  return &Roofs::fma;
}

double sample_cpu_roof(const std::string& kernel) {
  const Arithmetic* unit = arithmetic(unit_of(kernel));
  return unit ? unit->sample() : 0;
}

Roofs measure_cpu_roofs() {
  Roofs r;
  for (double Roofs::*unit : {&Roofs::fma, &Roofs::bf16_dot, &Roofs::amx})
    if (const Arithmetic* a = arithmetic(unit)) r.*unit = a->best();
  r.read = read_bandwidth();
  return r;
}

}  // namespace winnow::bench
