// How handlers go through the lanes of their operands.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "emulated/warp.h"

namespace winnow::emulated {

// A lane's bits as a value, and back. Types of 16 bits and less stand in 32.
template <class T>
T get(const void* lanes, int lane) {
  if constexpr (sizeof(T) == 8) return std::bit_cast<T>(static_cast<const uint64_t*>(lanes)[lane]);
  else if constexpr (std::is_same_v<T, float>)
    return std::bit_cast<float>(static_cast<const uint32_t*>(lanes)[lane]);
  else return static_cast<T>(static_cast<const uint32_t*>(lanes)[lane]);
}
template <class T>
void put(void* lanes, int lane, T x) {
  if constexpr (sizeof(T) == 8) static_cast<uint64_t*>(lanes)[lane] = std::bit_cast<uint64_t>(x);
  else if constexpr (std::is_same_v<T, float>)
    static_cast<uint32_t*>(lanes)[lane] = std::bit_cast<uint32_t>(x);
  else static_cast<uint32_t*>(lanes)[lane] = static_cast<std::make_unsigned_t<T>>(x);
}
template <class T>
const void* in(const Step& s, const Operand& o) {
  if constexpr (sizeof(T) == 8) return s.wide(o);
  else return s.words(o);
}
template <class T>
void* out(Step& s, const Operand& o) {
  if constexpr (sizeof(T) == 8) return s.wide_out(o);
  else return s.words_out(o);
}

template <class R, class F>
void each(Step& s, const Instruction& i, F&& f) {
  if (s.operand(i, 0).kind != Operand::kRegister) return;
  void* d = out<R>(s, s.operand(i, 0));
  if (s.mask == ~0u) {
    for (int lane = 0; lane < 32; ++lane) put<R>(d, lane, f(lane));
  } else {
    for_lanes(s.mask, [&](int lane) { put<R>(d, lane, f(lane)); });
  }
}
template <class T, auto kF, class R = T>
void unary(Step& s, const Instruction& i) {
  const void* a = in<T>(s, s.operand(i, 1));
  each<R>(s, i, [=](int lane) { return kF(get<T>(a, lane)); });
}
template <class T, auto kF, class R = T, class B = T>
void binary(Step& s, const Instruction& i) {
  const void* a = in<T>(s, s.operand(i, 1));
  const void* b = in<B>(s, s.operand(i, 2));
  each<R>(s, i, [=](int lane) { return static_cast<R>(kF(get<T>(a, lane), get<B>(b, lane))); });
}
template <class T, auto kF, class R = T, class C = T>
void ternary(Step& s, const Instruction& i) {
  const void* a = in<T>(s, s.operand(i, 1));
  const void* b = in<T>(s, s.operand(i, 2));
  const void* c = in<C>(s, s.operand(i, 3));
  each<R>(s, i, [=](int lane) {
    return static_cast<R>(kF(get<T>(a, lane), get<T>(b, lane), get<C>(c, lane)));
  });
}

// f<T>() for the type's T.
template <class F>
Handler integer(Type type, F f) {
  switch (type) {
    case Type::kU16:
    case Type::kB16: return f.template operator()<uint16_t>();
    case Type::kS16: return f.template operator()<int16_t>();
    case Type::kU32:
    case Type::kB32: return f.template operator()<uint32_t>();
    case Type::kS32: return f.template operator()<int32_t>();
    case Type::kU64:
    case Type::kB64: return f.template operator()<uint64_t>();
    case Type::kS64: return f.template operator()<int64_t>();
    default: return nullptr;
  }
}
template <class T>
using Unsigned = std::make_unsigned_t<T>;

}  // namespace winnow::emulated
