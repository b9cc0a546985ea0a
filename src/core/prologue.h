// Norm, RoPE and Hadamard of one bf16 row: the steps between a projection and a record or a query.
// Every step reads bf16 and rounds once to bf16, so calls that fuse several of them give the bits
// of the single calls. These are the specification; cpu/prologue_simd.h has them in vectors.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/check.h"
#include "core/formats.h"
#include "winnow/norm.h"
#include "winnow/rotate.h"

namespace winnow::internal::core {

struct NormParams {
  NormKind kind = NormKind::kNone;
  const float* weight = nullptr;  // null: 1
  const float* bias = nullptr;    // null: 0
  float eps = 0;
};

struct RopeParams {
  const float* table = nullptr;  // null: no RoPE
  int64_t positions = 0;         // rows of the table
  int64_t position_stride = 0, sine_stride = 0, pair_stride = 0;
  bool half = false, first = false, inverse = false;
};

inline constexpr int kPairs = kRopeDim / 2;

// Cosines and sines of one position, the sign of an inverse rotation applied.
struct Angles {
  float cosine[kPairs], sine[kPairs];
};

// False if the position is outside the table.
WINNOW_HD inline bool in_table(const RopeParams& r, int64_t position) {
  return position >= 0 && position < r.positions;
}

// The row of the table of a position inside it.
WINNOW_HD inline const float* angles_row(const RopeParams& r, int64_t position) {
  return r.table + position * r.position_stride;
}

WINNOW_HD inline void load_angles(const RopeParams& r, const float* row, Angles& out) {
  for (int i = 0; i < kPairs; ++i) {
    const float sine = row[r.sine_stride + i * r.pair_stride];
    out.cosine[i] = row[i * r.pair_stride];
    out.sine[i] = r.inverse ? -sine : sine;
  }
}
WINNOW_HD inline void load_angles(const RopeParams& r, int64_t position, Angles& out) {
  load_angles(r, angles_row(r, position), out);
}

// Where the rotated values of a row of `width` begin.
WINNOW_HD inline int64_t rope_begin(const RopeParams& r, int64_t width) {
  return r.first ? 0 : width - kRopeDim;
}

// x: bf16, or the fp32 of a step before. Without a norm the row is rounded and nothing else.
template <class T>
void norm_row(const NormParams& n, const T* x, int64_t width, bf16* out) {
  if (n.kind == NormKind::kNone) {
    for (int64_t i = 0; i < width; ++i) out[i] = to_bf16(to_float(x[i]));
    return;
  }
  double sum = 0;
  for (int64_t i = 0; i < width; ++i) sum += to_float(x[i]);
  const auto count = static_cast<double>(width);
  const float mean = n.kind == NormKind::kLayer ? static_cast<float>(sum / count) : 0.0f;
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) {
    const double centred = to_float(x[i]) - mean;
    squares += centred * centred;
  }
  const float inverse = 1 / std::sqrt(static_cast<float>(squares / count) + n.eps);
  for (int64_t i = 0; i < width; ++i) {
    const float scaled = (to_float(x[i]) - mean) * inverse * (n.weight ? n.weight[i] : 1);
    out[i] = to_bf16(n.bias ? scaled + n.bias[i] : scaled);  // + 0 would turn -0 into 0
  }
}

// The 64 values at x, in place or to another place.
inline void rotate_row(const RopeParams& r, const Angles& a, const bf16* x, bf16* out) {
  for (int i = 0; i < kPairs; ++i) {
    const int first = r.half ? i : 2 * i;
    const int second = r.half ? i + kPairs : 2 * i + 1;
    const float u = to_float(x[first]);
    const float v = to_float(x[second]);
    out[first] = to_bf16(u * a.cosine[i] - v * a.sine[i]);
    out[second] = to_bf16(v * a.cosine[i] + u * a.sine[i]);
  }
}

// 128 values times the Hadamard matrix in natural order, H[i, j] = (-1)^popcount(i & j), divided by
// sqrt(128). The sums are exact in double.
inline void hadamard_row(const bf16* x, bf16* out) {
  constexpr int kSize = 128;
  double y[kSize];
  for (int i = 0; i < kSize; ++i) y[i] = to_float(x[i]);
  for (int step = 1; step < kSize; step *= 2)
    for (int i = 0; i < kSize; ++i) {
      if (i & step) continue;
      const double low = y[i];
      const double high = y[i + step];
      y[i] = low + high;
      y[i + step] = low - high;
    }
  for (int i = 0; i < kSize; ++i)
    out[i] = to_bf16(static_cast<float>(y[i] * 0.08838834764831845));  // 128^-1/2
}

// A norm of rows of `width` values. `argument` ("norm") begins the names in messages.
NormParams checked_norm(const Check& check, const Norm& norm, int64_t width);
// A table that is given.
RopeParams checked_rope(const Check& check, const Rope& rope);

}  // namespace winnow::internal::core
