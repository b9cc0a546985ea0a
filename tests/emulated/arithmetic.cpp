// Arithmetic of PTX: each handler runs one instruction for the lanes of its mask.
#include <bit>
#include <cmath>
#include <limits>

#include "emulated/lanes.h"
#include "emulated/numbers.h"

namespace winnow::emulated {
namespace {

float nan_of_device() { return std::bit_cast<float>(0x7fffffffu); }
float canonical(float x) { return x != x ? nan_of_device() : x; }
float flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.f, x) : x;
}

// Two 16-bit halves.
template <auto kF>
uint32_t halves(uint32_t a, uint32_t b) {
  return static_cast<uint16_t>(kF(static_cast<uint16_t>(a), static_cast<uint16_t>(b))) |
         static_cast<uint32_t>(static_cast<uint16_t>(
             kF(static_cast<uint16_t>(a >> 16), static_cast<uint16_t>(b >> 16))))
             << 16;
}
template <auto kF>
uint32_t halves3(uint32_t a, uint32_t b, uint32_t c) {
  return static_cast<uint16_t>(
             kF(static_cast<uint16_t>(a), static_cast<uint16_t>(b), static_cast<uint16_t>(c))) |
         static_cast<uint32_t>(static_cast<uint16_t>(kF(static_cast<uint16_t>(a >> 16),
                                                        static_cast<uint16_t>(b >> 16),
                                                        static_cast<uint16_t>(c >> 16))))
             << 16;
}

// The larger of two bf16 magnitudes (smaller: kMin), with the sign of the product.
template <bool kMin, bool kNan>
uint16_t by_magnitude(uint16_t a, uint16_t b) {
  const uint16_t sign = (a ^ b) & 0x8000;
  const uint16_t x = a & 0x7fff, y = b & 0x7fff;
  const bool nan_x = x > 0x7f80, nan_y = y > 0x7f80;
  if (kNan && (nan_x || nan_y)) return 0x7fff;
  if (nan_x && nan_y) return 0x7fff;
  const uint16_t chosen = nan_x ? y : nan_y ? x : kMin ? std::min(x, y) : std::max(x, y);
  return chosen | sign;
}

template <bool kMin>
float extreme(float a, float b) {
  if (a != a) return canonical(b);
  if (b != b) return a;
  if (a == b) return std::signbit(a) == kMin ? a : b;
  return (a < b) == kMin ? a : b;
}
template <bool kMin>
float extreme_nan(float a, float b) {
  return a != a || b != b ? nan_of_device() : extreme<kMin>(a, b);
}

Handler add_or_sub(const Instruction& i, bool sub) {
  const bool carry_out = has_part(i.name, "cc");
  const std::string_view base = part_of(i.name, 0);
  const bool carry_in = base == "addc" || base == "subc";
  if (carry_out || carry_in) {
    if (sub)
      return [](Step& s, const Instruction& at) {
        const bool from = part_of(at.name, 0) == "subc", to = has_part(at.name, "cc");
        for_lanes(s.mask, [&](int lane) {
          const uint64_t a = static_cast<uint32_t>(s.value(s.operand(at, 1), lane));
          const uint64_t b = static_cast<uint32_t>(s.value(s.operand(at, 2), lane));
          const uint64_t borrow = from ? s.warp.carry >> lane & 1 : 0;
          const uint64_t x = a - b - borrow;
          s.set_value(s.operand(at, 0), lane, static_cast<uint32_t>(x));
          if (to) s.warp.carry = (s.warp.carry & ~(uint64_t{1} << lane)) | (x >> 63) << lane;
        });
      };
    return [](Step& s, const Instruction& at) {
      const bool from = part_of(at.name, 0) == "addc", to = has_part(at.name, "cc");
      for_lanes(s.mask, [&](int lane) {
        const uint64_t a = static_cast<uint32_t>(s.value(s.operand(at, 1), lane));
        const uint64_t b = static_cast<uint32_t>(s.value(s.operand(at, 2), lane));
        const uint64_t x = a + b + (from ? s.warp.carry >> lane & 1 : 0);
        s.set_value(s.operand(at, 0), lane, static_cast<uint32_t>(x));
        if (to) s.warp.carry = (s.warp.carry & ~(uint64_t{1} << lane)) | (x >> 32 & 1) << lane;
      });
    };
  }
  switch (i.type) {
    case Type::kF32:
      if (has_part(i.name, "ftz")) return nullptr;
      return sub ? binary<float, [](float a, float b) { return canonical(a - b); }>
                 : binary<float, [](float a, float b) { return canonical(a + b); }>;
    case Type::kF64:
      return sub ? binary<double, [](double a, double b) { return a - b; }>
                 : binary<double, [](double a, double b) { return a + b; }>;
    case Type::kS16x2:
    case Type::kU16x2:
      return sub ? binary<uint32_t, halves<[](uint16_t a, uint16_t b) { return a - b; }>>
                 : binary<uint32_t, halves<[](uint16_t a, uint16_t b) { return a + b; }>>;
    case Type::kBf16x2:
      return sub ? binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                            return to_bf16(from_bf16(a) - from_bf16(b));
                          }>>
                 : binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                            return to_bf16(from_bf16(a) + from_bf16(b));
                          }>>;
    case Type::kF16x2:
      return sub ? binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                            return to_f16(from_f16(a) - from_f16(b));
                          }>>
                 : binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                            return to_f16(from_f16(a) + from_f16(b));
                          }>>;
    default:
      return integer(i.type, [=]<class T>() -> Handler {
        using U = Unsigned<T>;
        return sub ? binary<U, [](U a, U b) -> U { return static_cast<U>(a - b); }>
                   : binary<U, [](U a, U b) -> U { return static_cast<U>(a + b); }>;
      });
  }
}

__extension__ using Int128 = __int128;
__extension__ using Uint128 = unsigned __int128;
template <class T>
using Wider = std::conditional_t<
    std::is_same_v<T, uint16_t>, uint32_t,
    std::conditional_t<
        std::is_same_v<T, int16_t>, int32_t,
        std::conditional_t<
            std::is_same_v<T, uint32_t>, uint64_t,
            std::conditional_t<std::is_same_v<T, int32_t>, int64_t,
                               std::conditional_t<std::is_same_v<T, uint64_t>, Uint128, Int128>>>>>;

Handler multiply(const Instruction& i) {
  if (i.type == Type::kF32) {
    if (has_part(i.name, "ftz"))
      return binary<float,
                    [](float a, float b) { return flushed(canonical(flushed(a) * flushed(b))); }>;
    return binary<float, [](float a, float b) { return canonical(a * b); }>;
  }
  if (i.type == Type::kF64) return binary<double, [](double a, double b) { return a * b; }>;
  if (i.type == Type::kF16x2)
    return binary<uint32_t,
                  halves<[](uint16_t a, uint16_t b) { return to_f16(from_f16(a) * from_f16(b)); }>>;
  if (i.type == Type::kBf16x2)
    return binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                    return to_bf16(from_bf16(a) * from_bf16(b));
                  }>>;
  if (has_part(i.name, "wide"))
    return integer(i.type, []<class T>() -> Handler {
      if constexpr (sizeof(T) == 8) return nullptr;
      else
        return binary<T, [](T a, T b) -> Wider<T> { return static_cast<Wider<T>>(a) * b; },
                      Wider<T>>;
    });
  if (has_part(i.name, "hi"))
    return integer(i.type, []<class T>() -> Handler {
      return binary<T, [](T a, T b) -> T {
        return static_cast<T>((static_cast<Wider<T>>(a) * b) >> (8 * sizeof(T)));
      }>;
    });
  return integer(i.type, []<class T>() -> Handler {
    return binary<T, [](T a, T b) -> T {
      return static_cast<T>(static_cast<Wider<Unsigned<T>>>(static_cast<Unsigned<T>>(a)) *
                            static_cast<Unsigned<T>>(b));
    }>;
  });
}

Handler multiply_add(const Instruction& i) {
  const bool wide = has_part(i.name, "wide"), high = has_part(i.name, "hi");
  if (part_of(i.name, 0) == "madc" || has_part(i.name, "cc"))
    return [](Step& s, const Instruction& at) {
      const bool from = part_of(at.name, 0) == "madc", to = has_part(at.name, "cc");
      const bool hi = has_part(at.name, "hi");
      for_lanes(s.mask, [&](int lane) {
        const uint64_t product = uint64_t{static_cast<uint32_t>(s.value(s.operand(at, 1), lane))} *
                                 static_cast<uint32_t>(s.value(s.operand(at, 2), lane));
        const uint64_t half = hi ? product >> 32 : product & 0xffffffff;
        const uint64_t x = half + static_cast<uint32_t>(s.value(s.operand(at, 3), lane)) +
                           (from ? s.warp.carry >> lane & 1 : 0);
        s.set_value(s.operand(at, 0), lane, static_cast<uint32_t>(x));
        if (to) s.warp.carry = (s.warp.carry & ~(uint64_t{1} << lane)) | (x >> 32 & 1) << lane;
      });
    };
  if (i.type == Type::kF32 || i.type == Type::kF64) return nullptr;
  if (wide)
    return integer(i.type, []<class T>() -> Handler {
      if constexpr (sizeof(T) == 8) return nullptr;
      else {
        using W = Wider<T>;
        return ternary<T,
                       [](T a, T b, W c) -> W {
                         return static_cast<W>(static_cast<Unsigned<W>>(static_cast<W>(a) * b) +
                                               static_cast<Unsigned<W>>(c));
                       },
                       W, W>;
      }
    });
  if (high)
    return integer(i.type, []<class T>() -> Handler {
      return ternary<T, [](T a, T b, T c) -> T {
        return static_cast<T>(
            static_cast<Unsigned<T>>((static_cast<Wider<T>>(a) * b) >> (8 * sizeof(T))) +
            static_cast<Unsigned<T>>(c));
      }>;
    });
  return integer(i.type, []<class T>() -> Handler {
    using U = Unsigned<T>;
    return ternary<U, [](U a, U b, U c) -> U {
      return static_cast<U>(static_cast<U>(static_cast<Wider<U>>(a) * b) + c);
    }>;
  });
}

Handler fused(const Instruction& i) {
  if (i.type == Type::kF64)
    return ternary<double, [](double a, double b, double c) { return std::fma(a, b, c); }>;
  if (i.type == Type::kBf16x2)
    return ternary<uint32_t, halves3<[](uint16_t a, uint16_t b, uint16_t c) {
                     return to_bf16(static_cast<float>(
                         static_cast<double>(from_bf16(a)) * from_bf16(b) + from_bf16(c)));
                   }>>;
  if (i.type == Type::kF16x2)
    return ternary<uint32_t, halves3<[](uint16_t a, uint16_t b, uint16_t c) {
                     return to_f16(static_cast<float>(
                         static_cast<double>(from_f16(a)) * from_f16(b) + from_f16(c)));
                   }>>;
  if (i.type != Type::kF32 || has_part(i.name, "ftz")) return nullptr;
  if (has_part(i.name, "rm"))
    return ternary<float, [](float a, float b, float c) {
      const double exact = static_cast<double>(a) * b + c;  // near enough for rounding down below
      const float nearest = static_cast<float>(exact);
      return (static_cast<double>(nearest) > exact) ? std::nextafter(nearest, -INFINITY) : nearest;
    }>;
  return ternary<float,
                 [](float a, float b, float c) { return canonical(__builtin_fmaf(a, b, c)); }>;
}

template <bool kMin>
Handler smallest_or_largest(const Instruction& i) {
  if (i.type == Type::kF32) {
    if (has_part(i.name, "NaN")) return binary<float, extreme_nan<kMin>>;
    return binary<float, extreme<kMin>>;
  }
  if (i.type == Type::kBf16x2 && has_part(i.name, "xorsign")) {
    if (has_part(i.name, "NaN")) return binary<uint32_t, halves<by_magnitude<kMin, true>>>;
    return binary<uint32_t, halves<by_magnitude<kMin, false>>>;
  }
  if (i.type == Type::kU16x2)
    return binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                    return kMin ? std::min(a, b) : std::max(a, b);
                  }>>;
  if (i.type == Type::kS16x2)
    return binary<uint32_t, halves<[](uint16_t a, uint16_t b) {
                    const auto x = static_cast<int16_t>(a), y = static_cast<int16_t>(b);
                    return static_cast<uint16_t>(kMin ? std::min(x, y) : std::max(x, y));
                  }>>;
  return integer(i.type, []<class T>() -> Handler {
    return binary<T, [](T a, T b) { return kMin ? std::min(a, b) : std::max(a, b); }>;
  });
}

Handler quotient(const Instruction& i, bool rest) {
  if (i.type == Type::kF32) return binary<float, [](float a, float b) { return canonical(a / b); }>;
  if (i.type == Type::kF64) return binary<double, [](double a, double b) { return a / b; }>;
  return integer(i.type, [=]<class T>() -> Handler {
    // Division by 0 gives ones on the device.
    if (rest)
      return binary<T, [](T a, T b) -> T {
        return b == 0                                           ? a
               : b == static_cast<T>(-1) && std::is_signed_v<T> ? T{0}
                                                                : static_cast<T>(a % b);
      }>;
    return binary<T, [](T a, T b) -> T {
      return b == 0 ? static_cast<T>(-1)
             : b == static_cast<T>(-1) && std::is_signed_v<T>
                 ? static_cast<T>(0 - static_cast<Unsigned<T>>(a))
                 : static_cast<T>(a / b);
    }>;
  });
}

Handler of_functions(const Instruction& i, std::string_view base) {
  const bool ftz = has_part(i.name, "ftz");
  if (i.type == Type::kF64) {
    if (base == "sqrt") return unary<double, [](double x) { return std::sqrt(x); }>;
    if (base == "rcp") return unary<double, [](double x) { return 1 / x; }>;
    return nullptr;
  }
  if (i.type != Type::kF32) return nullptr;
  if (base == "ex2")
    return ftz ? unary<float, [](float x) { return flushed(canonical(std::exp2(flushed(x)))); }>
               : unary<float, [](float x) { return canonical(std::exp2(x)); }>;
  if (base == "lg2")
    return ftz ? unary<float, [](float x) { return canonical(std::log2(flushed(x))); }>
               : unary<float, [](float x) { return canonical(std::log2(x)); }>;
  if (base == "rcp")
    return ftz ? unary<float, [](float x) { return flushed(canonical(1 / flushed(x))); }>
               : unary<float, [](float x) { return canonical(1 / x); }>;
  if (base == "sqrt") return unary<float, [](float x) { return canonical(std::sqrt(x)); }>;
  if (base == "rsqrt")
    return unary<float, [](float x) {
      return canonical(static_cast<float>(1 / std::sqrt(static_cast<double>(x))));
    }>;
  if (base == "sin") return unary<float, [](float x) { return canonical(std::sin(x)); }>;
  if (base == "cos") return unary<float, [](float x) { return canonical(std::cos(x)); }>;
  return nullptr;
}

Handler sign(const Instruction& i, bool neg) {
  if (i.type == Type::kF32)
    return neg ? unary<uint32_t, [](uint32_t x) { return x ^ 0x80000000u; }>
               : unary<uint32_t, [](uint32_t x) { return x & 0x7fffffffu; }>;
  if (i.type == Type::kF64)
    return neg ? unary<double, [](double x) { return -x; }>
               : unary<double, [](double x) { return std::fabs(x); }>;
  if (i.type == Type::kBf16x2 || i.type == Type::kF16x2)
    return neg ? unary<uint32_t, [](uint32_t x) { return x ^ 0x80008000u; }>
               : unary<uint32_t, [](uint32_t x) { return x & 0x7fff7fffu; }>;
  return integer(i.type, [=]<class T>() -> Handler {
    using U = Unsigned<T>;
    return neg ? unary<T, [](T x) { return static_cast<T>(0 - static_cast<U>(x)); }>
               : unary<T, [](T x) {
                   return static_cast<T>(static_cast<std::make_signed_t<T>>(x) < 0
                                             ? 0 - static_cast<U>(x)
                                             : static_cast<U>(x));
                 }>;
  });
}

}  // namespace

Handler find_arithmetic(Instruction& i, const Function&) {
  const std::string_view base = part_of(i.name, 0);
  if (base == "add" || base == "addc") return add_or_sub(i, false);
  if (base == "sub" || base == "subc") return add_or_sub(i, true);
  if (base == "mul") return multiply(i);
  if (base == "mad" || base == "madc") return multiply_add(i);
  if (base == "fma") return fused(i);
  if (base == "min") return smallest_or_largest<true>(i);
  if (base == "max") return smallest_or_largest<false>(i);
  if (base == "neg") return sign(i, true);
  if (base == "abs") return sign(i, false);
  if (base == "div") return quotient(i, false);
  if (base == "rem") return quotient(i, true);
  return of_functions(i, base);
}

}  // namespace winnow::emulated
