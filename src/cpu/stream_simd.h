// Stores past the caches in Highway vectors. Included once per target, after hwy/highway.h.
#if defined(WINNOW_CPU_STREAM_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_CPU_STREAM_SIMD_H
#undef WINNOW_CPU_STREAM_SIMD_H
#else
#define WINNOW_CPU_STREAM_SIMD_H
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "cpu/threads.h"
#include "hwy/cache_control.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

inline constexpr int64_t kLine = 64;  // bytes

inline bool at_line(const void* p) { return reinterpret_cast<uintptr_t>(p) % kLine == 0; }

// Whether a call that writes so many bytes writes them past the caches. Through them, a line is
// read before it is written, which costs a long call more than it costs the next one to read from
// memory.
inline bool is_long(int64_t bytes) {
  constexpr int64_t kLong = int64_t{128} << 10;  // of each worker
  return bytes >= kLong * threads();
}

// Whole lines from anywhere. hwy::FlushStream() belongs behind the last of a task.
HWY_INLINE void stream_lines(const void* from, int64_t bytes, void* to) {
  const hn::CappedTag<uint8_t, kLine> d;
  for (int64_t at = 0; at < bytes; at += static_cast<int64_t>(hn::Lanes(d)))
    hn::Stream(hn::LoadU(d, static_cast<const uint8_t*>(from) + at), d,
               static_cast<uint8_t*>(to) + at);
}

// Pieces that lines are written in at a row's edges.
inline constexpr int64_t kEdge = 16;

// The same to rows that begin and end inside lines, at multiples of kEdge: those lines are shared
// with other rows and go through the caches.
HWY_INLINE void stream_row(const std::byte* from, int64_t bytes, std::byte* to) {
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) % kLine);
  const int64_t begin = (kLine - past_line) % kLine;
  const int64_t end = begin + (bytes - begin) / kLine * kLine;
  for (int64_t at = 0; at < begin; at += kEdge) std::memcpy(to + at, from + at, kEdge);
  stream_lines(from + begin, end - begin, to + begin);
  for (int64_t at = end; at < bytes; at += kEdge) std::memcpy(to + at, from + at, kEdge);
}

}  // namespace winnow::internal::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
