// Where a fuzz target's choices come from: the bytes of an input while they last, then a generator.
// A seed alone makes a problem too, so that one target serves libFuzzer, the stored corpora and the
// tests from fixed seeds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace winnow::testing {

class Source {
 public:
  using result_type = uint64_t;  // of a standard generator, for std::shuffle

  explicit Source(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  // The first two bytes seed the generator: a change after them leaves bulk contents as they are.
  explicit Source(std::span<const uint8_t> input) : Source(seed_of(input)) {
    input_ = input;
    left_ = input.subspan(input.size() < 2 ? input.size() : 2);
  }

  // lo <= result <= hi, from as few bytes as the range needs.
  int64_t draw(int64_t lo, int64_t hi) {
    const uint64_t range = static_cast<uint64_t>(hi) - static_cast<uint64_t>(lo) + 1;
    const uint64_t x = left_.empty() ? (*this)() : take(range);
    return static_cast<int64_t>(static_cast<uint64_t>(lo) + (range == 0 ? x : x % range));
  }
  // About normal, always from the generator: bulk contents do not use up the input.
  float normal() {
    const uint64_t r = (*this)();
    const auto sum =
        static_cast<int64_t>((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48)) -
        2 * 65535;
    return static_cast<float>(sum) * (1.7320508f / 65536.0f);
  }
  // The whole input, for targets that read bytes; empty where a seed made the source.
  std::span<const uint8_t> input() const { return input_; }

  // splitmix64.
  uint64_t operator()() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  static constexpr uint64_t min() { return 0; }
  static constexpr uint64_t max() { return UINT64_MAX; }

 private:
  static uint64_t seed_of(std::span<const uint8_t> input) {
    uint64_t seed = 0;
    for (size_t i = 0; i < 2 && i < input.size(); ++i) seed = seed * 256 + input[i];
    return seed;
  }
  uint64_t take(uint64_t range) {
    uint64_t x = 0;
    for (uint64_t most = range - 1; most > 0 && !left_.empty(); most >>= 8) {
      x = x << 8 | left_.front();
      left_ = left_.subspan(1);
    }
    return x;
  }

  std::span<const uint8_t> input_, left_;
  uint64_t state_;
};

}  // namespace winnow::testing
