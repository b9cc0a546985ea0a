// Each roof is the best of many samples of a millisecond or two, all workers at once: short enough
// that some fall between the neighbours' turns on a busy machine.
#include "roofs.h"

#include <algorithm>
#include <chrono>
#include <cstring>
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

// Made when it is first requested; null where the machine has no such unit.
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

// A buffer that the caches cannot hold, in stretches that keep every worker busy. A sample passes
// over the next quarter of it, which the three before it have pushed out of the caches.
class Memory {
 public:
  static constexpr int64_t kStretch = int64_t{1} << 16;  // words: 512 KiB

  Memory() {
    internal::cpu::parallel_for(stretches_, [&](int64_t i, int) {
      std::fill_n(stretch(i), kStretch, static_cast<uint64_t>(i));
    });
  }
  // B/s of body(stretch), by which so many times its bytes are moved.
  template <class F>
  double best(int64_t times, F&& body) const {
    const int64_t quarter = stretches_ / 4;
    double best = 0;
    for (int i = 0; i < kSamples; ++i) {
      const int64_t first = i % 4 * quarter;
      const auto start = Clock::now();
      internal::cpu::parallel_for(quarter, [&](int64_t s, int) { body(first + s); });
      const auto moved = static_cast<double>(times * quarter * kStretch * 8);
      best = std::max(best, moved / seconds_since(start));
    }
    return best;
  }
  uint64_t* stretch(int64_t i) const { return data_.get() + i * kStretch; }
  int64_t stretches() const { return stretches_; }

 private:
  int64_t stretches_ = std::max<int64_t>(int64_t{256} << 20, 2 * cache_bytes()) / 8 / kStretch;
  std::unique_ptr<uint64_t[]> data_{new uint64_t[stretches_ * kStretch]};
};

double read_bandwidth(const Memory& memory) {
  std::unique_ptr<uint64_t[]> sums(new uint64_t[memory.stretches()]);
  const double best =
      memory.best(1, [&](int64_t s) { sums[s] = sum_of(memory.stretch(s), Memory::kStretch); });
  volatile uint64_t sink = sums[0];  // keeps the sums, and so the reads, alive
  (void)sink;
  return best;
}

// The first half of each stretch to its second, bytes read and written.
double copy_bandwidth(const Memory& memory) {
  constexpr int64_t kHalf = Memory::kStretch / 2;
  return memory.best(1, [&](int64_t s) {
    std::memcpy(memory.stretch(s) + kHalf, memory.stretch(s), kHalf * sizeof(uint64_t));
  });
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
  const Memory memory;
  r.read = read_bandwidth(memory);
  r.copy = copy_bandwidth(memory);
  return r;
}

}  // namespace winnow::bench
