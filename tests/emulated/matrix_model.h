// What the tests of matrix instructions and of conversions hold them against: it goes element by
// element and says which lane holds it, at which byte it lies, what it is worth.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <ostream>
#include <random>
#include <utility>
#include <vector>

#include "emulated/matrix.h"

namespace winnow::emulated {

// GoogleTest names cases by it.
inline void PrintTo(Element element, std::ostream* to) {
  constexpr const char* kNames[] = {"f16", "bf16", "e4m3", "e5m2"};
  *to << kNames[static_cast<int>(element)];
}

namespace model {

using Random = std::mt19937;

inline uint32_t below(Random& random, uint32_t end) {
  return std::uniform_int_distribution<uint32_t>(0, end - 1)(random);
}

inline int bytes_of(Element element) {
  return element == Element::kF16 || element == Element::kBf16 ? 2 : 1;
}

struct Format {
  int exponent_bits, fraction_bits;
};
inline Format format_of(Element element) {
  switch (element) {
    case Element::kF16: return {5, 10};
    case Element::kBf16: return {8, 7};
    case Element::kE4m3: return {4, 3};
    default: return {5, 2};
  }
}

inline double computed_value(Element element, uint32_t code) {
  const Format format = format_of(element);
  const int fields = 1 << format.exponent_bits, steps = 1 << format.fraction_bits;
  const int exponent = static_cast<int>(code >> format.fraction_bits) % fields;
  const int fraction = static_cast<int>(code) % steps;
  const double sign = code >> (format.exponent_bits + format.fraction_bits) ? -1 : 1;
  const int bias = fields / 2 - 1;
  const bool infinities = element != Element::kE4m3;
  if (exponent == fields - 1 && infinities)
    return fraction ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  if (exponent == fields - 1 && fraction == steps - 1) return std::nan("");
  if (exponent == 0) return sign * std::ldexp(fraction, 1 - bias - format.fraction_bits);
  return sign * std::ldexp(steps + fraction, exponent - bias - format.fraction_bits);
}

inline double value_of(Element element, uint32_t code) {
  static const auto kValues = [] {
    std::vector<double> values[4];
    for (int i = 0; i < 4; ++i)
      for (uint32_t code = 0; code < 1u << 16; ++code)
        values[i].push_back(computed_value(static_cast<Element>(i), code));
    return std::to_array(std::move(values));
  }();
  return kValues[static_cast<int>(element)][code];
}

// Exponents from -4 to 4: sums of products are then exact in double, in any order.
inline uint32_t moderate_code(Random& random, Element element) {
  const Format format = format_of(element);
  const uint32_t bias = (1u << (format.exponent_bits - 1)) - 1;
  const uint32_t exponent = bias - 4 + below(random, 9);
  return below(random, 2) << (format.exponent_bits + format.fraction_bits) |
         exponent << format.fraction_bits | below(random, 1u << format.fraction_bits);
}
inline uint32_t moderate_float(Random& random) {
  return below(random, 2) << 31 | (123 + below(random, 9)) << 23 | below(random, 1u << 23);
}

struct Shared {
  std::vector<std::byte> bytes;

  explicit Shared(size_t size) : bytes(size) {}
  Shared(size_t size, Random& random, Element element) : bytes(size) {
    for (size_t at = 0; at < size; at += bytes_of(element))
      put(at, element, moderate_code(random, element));
  }
  SharedBytes view() { return {bytes.data(), bytes.size()}; }
  void put(size_t at, Element element, uint32_t code) {
    std::memcpy(bytes.data() + at, &code, bytes_of(element));
  }
  uint32_t get(size_t at, Element element) const {
    uint32_t code = 0;
    std::memcpy(&code, bytes.data() + at, bytes_of(element));
    return code;
  }
};

struct Registers {
  std::vector<std::vector<uint32_t>> lanes;
  std::vector<uint32_t*> pointers;

  explicit Registers(size_t count) : lanes(count, std::vector<uint32_t>(32)) {
    for (auto& lane : lanes) pointers.push_back(lane.data());
  }
  Registers(const Registers& other) : Registers(other.lanes.size()) { lanes_from(other); }
  void lanes_from(const Registers& other) {
    for (size_t i = 0; i < lanes.size(); ++i)
      std::copy(other.lanes[i].begin(), other.lanes[i].end(), pointers[i]);
  }
  void randomize(Random& random, Element element) {
    const int bits = 8 * bytes_of(element);
    for (auto& lane : lanes)
      for (uint32_t& word : lane) {
        word = 0;
        for (int at = 0; at < 32; at += bits) word |= moderate_code(random, element) << at;
      }
  }
  void randomize_floats(Random& random) {
    for (auto& lane : lanes)
      for (uint32_t& word : lane) word = moderate_float(random);
  }
  uint32_t* const* data() { return pointers.data(); }
  uint32_t element(int index, int lane, int byte, Element element) const {
    return lanes[index][lane] >> 8 * byte & ((1u << 8 * bytes_of(element)) - 1);
  }
};

// Element (row, k) of the fragment of A: four lanes share a row, each has four bytes of 16.
inline uint32_t a_of(const Registers& a, Element element, int row, int k) {
  const int byte = k * bytes_of(element);
  return a.element(row / 8 + byte / 16 * 2, row % 8 * 4 + byte % 16 / 4, byte % 4, element);
}
inline uint32_t b_of(const Registers& b, Element element, int k, int column) {
  const int byte = k * bytes_of(element);
  return b.element(byte / 16, column * 4 + byte % 16 / 4, byte % 4, element);
}
inline uint32_t& sum_of(Registers& sums, int row, int column) {
  return sums.lanes[column / 8 * 4 + row / 8 * 2 + column % 2][row % 8 * 4 + column % 8 / 2];
}

struct Layout {
  uint32_t start = 0, leading = 0, stride = 0;
  uint32_t base_offset = 0;
  int mode = 1;  // 0: no swizzle, 1: 128 bytes, 2: 64, 3: 32
  bool transposed = false;

  uint64_t descriptor() const {
    return uint64_t{start / 16} | uint64_t{leading / 16} << 16 | uint64_t{stride / 16} << 32 |
           uint64_t{base_offset} << 49 | static_cast<uint64_t>(mode) << 62;
  }
  uint32_t span() const { return mode == 0 ? 16 : 256u >> mode; }
  // Where element (mn, k) lies.
  uint32_t address(uint32_t mn, uint32_t k, uint32_t element_bytes) const {
    const uint32_t byte = k * element_bytes;
    uint32_t at = start;
    if (!transposed && mode == 0)
      at += mn / 8 * stride + mn % 8 * 16 + byte / 16 * leading + byte % 16;
    else if (!transposed) at += mn / 8 * stride + mn % 8 * span() + byte;
    else if (mode == 0) at += mn / 8 * stride + mn % 8 * 2 + k / 8 * leading + k % 8 * 16;
    else
      at += mn / (span() / 2) * leading + mn % (span() / 2) * 2 + k / 8 * stride + k % 8 * span();
    const uint32_t row = at / 128 - base_offset;
    for (uint32_t bit = 0; 32u << bit <= span(); ++bit) at ^= (row >> bit & 1) << (4 + bit);
    return at;
  }
};

}  // namespace model
}  // namespace winnow::emulated
