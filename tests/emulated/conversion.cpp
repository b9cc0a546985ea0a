// cvt of PTX.
#include <bit>
#include <cmath>
#include <limits>

#include "emulated/numbers.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

bool is_float(Type t) {
  return t == Type::kF16 || t == Type::kBf16 || t == Type::kF32 || t == Type::kF64;
}
bool is_signed(Type t) {
  return t == Type::kS8 || t == Type::kS16 || t == Type::kS32 || t == Type::kS64;
}

double float_of(Type type, uint64_t bits) {
  switch (type) {
    case Type::kF16: return from_f16(static_cast<uint16_t>(bits));
    case Type::kBf16: return from_bf16(static_cast<uint16_t>(bits));
    case Type::kF32: return std::bit_cast<float>(static_cast<uint32_t>(bits));
    default: return std::bit_cast<double>(bits);
  }
}
// To fp32 from fp64, rounded as asked; both exact for narrower types.
float narrowed(double x, std::string_view rounding) {
  const auto nearest = static_cast<float>(x);
  if (static_cast<double>(nearest) == x || x != x || rounding == "rn") return nearest;
  const bool above = static_cast<double>(nearest) > x;
  if (rounding == "rm") return above ? std::nextafter(nearest, -INFINITY) : nearest;
  if (rounding == "rp") return above ? nearest : std::nextafter(nearest, INFINITY);
  return std::abs(nearest) > std::abs(x) ? std::nextafter(nearest, 0.f) : nearest;  // rz
}
uint64_t bits_of_float(Type type, double x, std::string_view rounding) {
  switch (type) {
    case Type::kF16: return to_f16(static_cast<float>(x));
    case Type::kBf16: return to_bf16(static_cast<float>(x));
    case Type::kF32: return x != x ? 0x7fffffffu : std::bit_cast<uint32_t>(narrowed(x, rounding));
    default: return std::bit_cast<uint64_t>(x);
  }
}
double to_integral(double x, std::string_view how) {
  if (how == "rzi") return std::trunc(x);
  if (how == "rmi") return std::floor(x);
  if (how == "rpi") return std::ceil(x);
  return std::nearbyint(x);
}
uint64_t saturated_integer(Type type, double x) {
  if (x != x) return 0;
  const int bits = 8 * bytes_of(type);
  const double most = std::ldexp(1.0, is_signed(type) ? bits - 1 : bits);
  const double least = is_signed(type) ? -most : 0;
  if (x <= least)
    return is_signed(type)
               ? uint64_t{1} << (bits - 1) | (bits < 64 ? ~uint64_t{0} << (bits - 1) : 0)
               : 0;
  if (x >= most)
    return bits == 64 ? (is_signed(type) ? INT64_MAX : UINT64_MAX)
                      : (uint64_t{1} << (is_signed(type) ? bits - 1 : bits)) - 1;
  return is_signed(type) ? static_cast<uint64_t>(static_cast<int64_t>(x))
                         : static_cast<uint64_t>(x);
}
int64_t extended(Type type, uint64_t bits) {
  switch (type) {
    case Type::kS8: return static_cast<int8_t>(bits);
    case Type::kS16: return static_cast<int16_t>(bits);
    case Type::kS32: return static_cast<int32_t>(bits);
    case Type::kU8:
    case Type::kB8: return static_cast<uint8_t>(bits);
    case Type::kU16:
    case Type::kB16: return static_cast<uint16_t>(bits);
    case Type::kU32:
    case Type::kB32: return static_cast<uint32_t>(bits);
    default: return static_cast<int64_t>(bits);
  }
}

void convert(Step& s, const Instruction& i) {
  const Type to = i.result, from = i.type;
  const std::string_view rounding = part_of(i.name, 1);
  const bool sat = has_part(i.name, "sat");
  const bool ftz = has_part(i.name, "ftz");
  for_lanes(s.mask, [&](int lane) {
    const uint64_t bits = s.value(s.operand(i, 1), lane);
    uint64_t result;
    if (is_float(from)) {
      double x = float_of(from, bits);
      if (ftz && from == Type::kF32 && std::abs(x) < std::numeric_limits<float>::min())
        x = std::copysign(0.0, x);
      if (is_float(to)) {
        if (rounding.size() == 3 && rounding.back() == 'i') x = to_integral(x, rounding);
        if (sat) x = x != x ? 0 : std::min(std::max(x, 0.0), 1.0);
        result = bits_of_float(to, x, rounding);
      } else {
        result = saturated_integer(to, to_integral(x, rounding));
      }
    } else {
      const int64_t x = extended(from, bits);
      if (to == Type::kF32) {
        // One rounding from 64 bits.
        const float f = is_signed(from) || x >= 0 ? static_cast<float>(x)
                                                  : static_cast<float>(static_cast<uint64_t>(x));
        result = std::bit_cast<uint32_t>(f);
        if (rounding == "rz" || rounding == "rm" || rounding == "rp") {
          const long double exact = is_signed(from) || x >= 0
                                        ? static_cast<long double>(x)
                                        : static_cast<long double>(static_cast<uint64_t>(x));
          float g = f;
          if (rounding == "rp"   ? f < exact
              : rounding == "rm" ? f > exact
                                 : std::abs(static_cast<long double>(f)) > std::abs(exact))
            g = std::nextafter(f, rounding == "rp" ? INFINITY : rounding == "rm" ? -INFINITY : 0.f);
          result = std::bit_cast<uint32_t>(g);
        }
      } else if (is_float(to)) {
        result =
            bits_of_float(to,
                          is_signed(from) || x >= 0 ? static_cast<double>(x)
                                                    : static_cast<double>(static_cast<uint64_t>(x)),
                          rounding);
      } else {
        result = static_cast<uint64_t>(x);
        if (sat) result = saturated_integer(to, static_cast<double>(x));
        if (bytes_of(to) < 4) {
          const Type narrow = to;
          result = static_cast<uint64_t>(extended(narrow, result));
          if (!is_signed(to)) result &= (uint64_t{1} << (8 * bytes_of(to))) - 1;
        }
      }
    }
    s.set_value(s.operand(i, 0), lane, result);
  });
}

// Two values into the halves of a register: the first operand is the upper one.
template <auto kF, int kBits>
void pack(Step& s, const Instruction& i) {
  const uint32_t* high = s.words(s.operand(i, 1));
  const uint32_t* low = s.words(s.operand(i, 2));
  uint32_t* to = s.words_out(s.operand(i, 0));
  for_lanes(s.mask, [&](int lane) {
    to[lane] = static_cast<uint32_t>(kF(std::bit_cast<float>(low[lane]))) |
               static_cast<uint32_t>(kF(std::bit_cast<float>(high[lane]))) << kBits;
  });
}

template <auto kF>
void unpack_to_f16(Step& s, const Instruction& i) {
  const uint32_t* from = s.words(s.operand(i, 1));
  uint32_t* to = s.words_out(s.operand(i, 0));
  for_lanes(s.mask, [&](int lane) {
    const auto one = [&](int shift) {
      const auto code = static_cast<uint8_t>(from[lane] >> shift);
      return static_cast<uint32_t>(to_f16(kF(code)));
    };
    to[lane] = one(0) | one(8) << 16;
  });
}

}  // namespace

Handler find_conversion(Instruction& i, const Function& function) {
  if (part_of(i.name, 0) != "cvt") return nullptr;
  if (has_part(i.name, "relu")) return nullptr;
  const Type to = i.result, from = i.type;
  if (from == Type::kF32 && i.count == 3) {
    if (to == Type::kBf16x2 && has_part(i.name, "rn")) return pack<to_bf16, 16>;
    if (to == Type::kF16x2 && has_part(i.name, "rn")) return pack<to_f16, 16>;
    if (to == Type::kE4m3x2) return pack<to_e4m3, 8>;
    return nullptr;
  }
  if (to == Type::kF16x2 && from == Type::kE4m3x2) return unpack_to_f16<from_e4m3>;
  if (to == Type::kF16x2 && from == Type::kE5m2x2) return unpack_to_f16<from_e5m2>;
  const Operand& a = function.operands[i.first];
  const Operand& b = function.operands[i.first + 1];
  if (a.wide && !b.wide && b.kind == Operand::kRegister) {
    if (from == Type::kU32 || from == Type::kB32)
      return [](Step& s, const Instruction& at) {
        const uint32_t* x = s.words(s.operand(at, 1));
        uint64_t* y = s.wide_out(s.operand(at, 0));
        for_lanes(s.mask, [&](int lane) { y[lane] = x[lane]; });
      };
    if (from == Type::kS32 && (to == Type::kS64 || to == Type::kU64))
      return [](Step& s, const Instruction& at) {
        const uint32_t* x = s.words(s.operand(at, 1));
        uint64_t* y = s.wide_out(s.operand(at, 0));
        for_lanes(s.mask, [&](int lane) {
          y[lane] = static_cast<uint64_t>(static_cast<int64_t>(static_cast<int32_t>(x[lane])));
        });
      };
  }
  if (is_float(to) || is_float(from) || bytes_of(to) <= 8) return convert;
  return nullptr;
}

}  // namespace winnow::emulated
