// Bits, comparisons and moves of PTX: each handler runs one instruction for the lanes of its mask.
#include <bit>

#include "emulated/lanes.h"

namespace winnow::emulated {
namespace {

template <class T>
T shifted_left(T a, uint32_t by) {
  return by >= 8 * sizeof(T) ? T{0} : static_cast<T>(a << by);
}
template <class T>
T shifted_right(T a, uint32_t by) {
  if (by >= 8 * sizeof(T)) return a < 0 ? static_cast<T>(-1) : T{0};
  return static_cast<T>(a >> by);
}

uint32_t permuted(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = a | static_cast<uint64_t>(b) << 32;
  uint32_t result = 0;
  for (int k = 0; k < 4; ++k) {
    const uint32_t s = selector >> (4 * k) & 15;
    uint32_t byte = static_cast<uint32_t>(both >> (8 * (s & 7))) & 0xff;
    if (s & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * k);
  }
  return result;
}

// setp and its kind: the comparison as a bit.
template <class T>
bool compares(std::string_view how, T a, T b) {
  const bool nan = a != a || b != b;
  if (how == "eq") return a == b;
  if (how == "ne") return a != b && !nan;
  if (how == "lt" || how == "lo") return a < b;
  if (how == "le" || how == "ls") return a <= b;
  if (how == "gt" || how == "hi") return a > b;
  if (how == "ge" || how == "hs") return a >= b;
  if (how == "equ") return a == b || nan;
  if (how == "neu") return a != b || nan;
  if (how == "ltu") return a < b || nan;
  if (how == "leu") return a <= b || nan;
  if (how == "gtu") return a > b || nan;
  if (how == "geu") return a >= b || nan;
  if (how == "num") return !nan;
  return nan;  // "nan"
}
enum Compare { kEq, kNe, kLt, kLe, kGt, kGe, kEqu, kNeu, kLtu, kLeu, kGtu, kGeu, kNum, kNan };
constexpr std::string_view kCompares[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                                          "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

template <class T, int kHow>
void compare(Step& s, const Instruction& i) {
  const void* a = in<T>(s, s.operand(i, i.count - 2));
  const void* b = in<T>(s, s.operand(i, i.count - 1));
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane)
    bits |= static_cast<uint32_t>(compares<T>(kCompares[kHow], get<T>(a, lane), get<T>(b, lane)))
            << lane;
  s.set_predicate(s.operand(i, 0), bits);
  if (i.count == 4) s.set_predicate(s.operand(i, 1), ~bits);
}
template <class T, int kHow = 0>
Handler comparison(std::string_view how) {
  if constexpr (kHow <= kNan) {
    if (how == kCompares[kHow]) return compare<T, kHow>;
    return comparison<T, kHow + 1>(how);
  } else {
    if (how == "lo") return compare<T, kLt>;
    if (how == "ls") return compare<T, kLe>;
    if (how == "hi") return compare<T, kGt>;
    if (how == "hs") return compare<T, kGe>;
    return nullptr;
  }
}

template <class T>
void select(Step& s, const Instruction& i) {
  const void* a = in<T>(s, s.operand(i, 1));
  const void* b = in<T>(s, s.operand(i, 2));
  const uint32_t which = s.predicate(s.operand(i, 3));
  each<T>(s, i, [=](int lane) { return which >> lane & 1 ? get<T>(a, lane) : get<T>(b, lane); });
}

// mov: registers, specials, symbols' addresses, and vectors packed or unpacked.
void move(Step& s, const Instruction& i) {
  const Operand& to = s.operand(i, 0);
  const Operand& from = s.operand(i, 1);
  if (to.kind == Operand::kPredicate) return s.set_predicate(to, s.predicate(from));
  if (to.kind == Operand::kVector && from.kind == Operand::kVector) {  // 128 bits
    for_lanes(s.mask, [&](int lane) {
      for (int k = 0; k < to.count; ++k)
        s.set_value(s.part(to, k), lane, s.value(s.part(from, k), lane));
    });
    return;
  }
  if (to.kind == Operand::kVector) {
    const int bits = 8 * bytes_of(i.type) / to.count;
    for_lanes(s.mask, [&](int lane) {
      const uint64_t whole =
          from.kind == Operand::kConstant ? s.value(from, lane) : s.value(from, lane);
      for (int k = 0; k < to.count; ++k) {
        const uint64_t part = whole >> (k * bits);
        s.set_value(s.part(to, k), lane, bits == 64 ? part : part & ((uint64_t{1} << bits) - 1));
      }
    });
    return;
  }
  if (from.kind == Operand::kVector) {
    const int bits = 8 * bytes_of(i.type) / from.count;
    for_lanes(s.mask, [&](int lane) {
      uint64_t whole = 0;
      for (int k = 0; k < from.count; ++k)
        whole |= (s.value(s.part(from, k), lane) &
                  (bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1))
                 << (k * bits);
      s.set_value(to, lane, whole);
    });
    return;
  }
  if (from.kind == Operand::kSymbol || from.kind == Operand::kLabel) {
    for_lanes(s.mask, [&](int lane) { s.set_value(to, lane, s.address(from, lane)); });
    return;
  }
  if (to.wide) {
    if (from.kind == Operand::kSpecial || (from.kind == Operand::kRegister && !from.wide)) {
      for_lanes(s.mask, [&](int lane) {
        s.set_value(to, lane,
                    from.at == kClock64 || from.at == kGlobaltimer ? s.launch.clock * 16
                                                                   : s.value(from, lane));
      });
    } else {
      const uint64_t* a = s.wide(from);
      each<uint64_t>(s, i, [=](int lane) { return a[lane]; });
    }
  } else {
    const uint32_t* a = s.words(from);
    each<uint32_t>(s, i, [=](int lane) { return a[lane]; });
  }
}

template <auto kF>
void on_predicates(Step& s, const Instruction& i) {
  const uint32_t a = s.predicate(s.operand(i, 1));
  const uint32_t b = i.count > 2 ? s.predicate(s.operand(i, 2)) : 0;
  s.set_predicate(s.operand(i, 0), kF(a, b));
}

template <auto kF>
Handler bitwise(const Instruction& i) {
  if (i.type == Type::kPred)
    return on_predicates<[](uint32_t a, uint32_t b) { return static_cast<uint32_t>(kF(a, b)); }>;
  return integer(i.type, []<class T>() -> Handler {
    return binary<T, [](T a, T b) { return static_cast<T>(kF(a, b)); }>;
  });
}

Handler of_bits(const Instruction& i, std::string_view base) {
  const bool wide = bytes_of(i.type) == 8;
  if (base == "popc")
    return wide
               ? unary<uint64_t, [](uint64_t x) { return static_cast<uint32_t>(std::popcount(x)); },
                       uint32_t>
               : unary<uint32_t,
                       [](uint32_t x) { return static_cast<uint32_t>(std::popcount(x)); }>;
  if (base == "clz")
    return wide ? unary<uint64_t,
                        [](uint64_t x) { return static_cast<uint32_t>(std::countl_zero(x)); },
                        uint32_t>
                : unary<uint32_t,
                        [](uint32_t x) { return static_cast<uint32_t>(std::countl_zero(x)); }>;
  if (base == "brev")
    return unary<uint32_t, [](uint32_t x) {
      uint32_t y = 0;
      for (int k = 0; k < 32; ++k) y |= (x >> k & 1) << (31 - k);
      return y;
    }>;
  if (base == "bfind") {
    if (i.type != Type::kU32) return nullptr;
    if (has_part(i.name, "shiftamt"))
      return unary<uint32_t,
                   [](uint32_t x) { return x ? static_cast<uint32_t>(std::countl_zero(x)) : ~0u; }>;
    return unary<uint32_t, [](uint32_t x) {
      return x ? static_cast<uint32_t>(31 - std::countl_zero(x)) : ~0u;
    }>;
  }
  if (base == "bfi")
    return [](Step& s, const Instruction& at) {
      const int width = bytes_of(at.type) * 8;
      for_lanes(s.mask, [&](int lane) {
        const uint64_t a = s.value(s.operand(at, 1), lane), b = s.value(s.operand(at, 2), lane);
        const uint64_t pos = s.value(s.operand(at, 3), lane) & 0xff,
                       len = s.value(s.operand(at, 4), lane) & 0xff;
        uint64_t result = b;
        for (uint64_t k = 0; k < len && pos + k < static_cast<uint64_t>(width); ++k)
          result = (result & ~(uint64_t{1} << (pos + k))) | (a >> k & 1) << (pos + k);
        s.set_value(s.operand(at, 0), lane, result);
      });
    };
  if (base == "bfe" && i.type != Type::kS64 && i.type != Type::kU64)
    return [](Step& s, const Instruction& at) {
      for_lanes(s.mask, [&](int lane) {
        const auto a = static_cast<uint32_t>(s.value(s.operand(at, 1), lane));
        const uint32_t pos = s.value(s.operand(at, 2), lane) & 0xff,
                       len = s.value(s.operand(at, 3), lane) & 0xff;
        const bool is_signed = at.type == Type::kS32;
        const uint32_t sign = is_signed && len > 0 ? a >> std::min(pos + len - 1, 31u) & 1 : 0;
        uint32_t result = 0;
        for (uint32_t k = 0; k < 32; ++k)
          result |= (k < len && pos + k < 32 ? a >> (pos + k) & 1 : sign) << k;
        s.set_value(s.operand(at, 0), lane, result);
      });
    };
  return nullptr;
}

}  // namespace

Handler find_bits(Instruction& i, const Function&) {
  const std::string_view base = part_of(i.name, 0);
  if (base == "and") return bitwise<[](auto a, auto b) { return a & b; }>(i);
  if (base == "or") return bitwise<[](auto a, auto b) { return a | b; }>(i);
  if (base == "xor") return bitwise<[](auto a, auto b) { return a ^ b; }>(i);
  if (base == "not") {
    if (i.type == Type::kPred) return on_predicates<[](uint32_t a, uint32_t) { return ~a; }>;
    return integer(i.type, []<class T>() -> Handler {
      return unary<T, [](T a) { return static_cast<T>(~a); }>;
    });
  }
  if (base == "shl")
    return integer(i.type,
                   []<class T>() -> Handler { return binary<T, shifted_left<T>, T, uint32_t>; });
  if (base == "shr")
    return integer(i.type,
                   []<class T>() -> Handler { return binary<T, shifted_right<T>, T, uint32_t>; });
  if (base == "shf") {
    if (has_part(i.name, "l"))
      return ternary<uint32_t, [](uint32_t a, uint32_t b, uint32_t c) {
        return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) << (c & 31) >> 32);
      }>;
    return ternary<uint32_t, [](uint32_t a, uint32_t b, uint32_t c) {
      return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> (c & 31));
    }>;
  }
  if (base == "prmt" && part_of(i.name, 2).empty()) return ternary<uint32_t, permuted>;
  if (base == "lop3")
    return [](Step& s, const Instruction& at) {
      const uint32_t* a = s.words(s.operand(at, 1));
      const uint32_t* b = s.words(s.operand(at, 2));
      const uint32_t* c = s.words(s.operand(at, 3));
      const uint64_t table = s.value(s.operand(at, 4), 0);
      each<uint32_t>(s, at, [=](int lane) {
        uint32_t result = 0;
        for (int k = 0; k < 8; ++k)
          if (table >> k & 1)
            result |= (k & 4 ? a[lane] : ~a[lane]) & (k & 2 ? b[lane] : ~b[lane]) &
                      (k & 1 ? c[lane] : ~c[lane]);
        return result;
      });
    };
  if (base == "mov") return move;
  if (base == "selp") {
    if (i.type == Type::kPred) return nullptr;
    if (bytes_of(i.type) == 8) return select<uint64_t>;
    return select<uint32_t>;
  }
  if (base == "setp") {
    const std::string_view how = part_of(i.name, 1);
    if (type_of(part_of(i.name, 2)) == Type::kNone && part_of(i.name, 2) != "ftz") return nullptr;
    if (i.type == Type::kF32) return comparison<float>(how);
    if (i.type == Type::kF64) return comparison<double>(how);
    return integer(i.type, [=]<class T>() -> Handler { return comparison<T>(how); });
  }
  return of_bits(i, base);
}

}  // namespace winnow::emulated
