#include "accuracy.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include "core/check.h"
#include "core/formats.h"

namespace winnow::tools {

namespace {

std::array<int64_t, 4> coordinates(const Tensor& t, int64_t index) {
  std::array<int64_t, 4> at{};
  for (int d = t.rank - 1; d >= 0; --d) {
    at[d] = index % t.shape[d];
    index /= t.shape[d];
  }
  return at;
}

}  // namespace

double element(const Tensor& t, int64_t index) {
  const std::array<int64_t, 4> at = coordinates(t, index);
  int64_t offset = 0;
  for (int d = 0; d < t.rank; ++d) offset += at[d] * t.stride[d];
  switch (t.dtype) {
    case DType::kBf16: return to_float(static_cast<const bf16*>(t.data)[offset]);
    case DType::kE4m3: return to_float(static_cast<const e4m3*>(t.data)[offset]);
    case DType::kF32: return static_cast<const float*>(t.data)[offset];
    case DType::kI32: return static_cast<const int32_t*>(t.data)[offset];
    case DType::kI64: return static_cast<double>(static_cast<const int64_t*>(t.data)[offset]);
    case DType::kU8: break;
  }
  return static_cast<const uint8_t*>(t.data)[offset];
}

std::string place(const Tensor& t, int64_t index) {
  const std::array<int64_t, 4> at = coordinates(t, index);
  std::string s = "[";
  for (int d = 0; d < t.rank; ++d) s += (d ? ", " : "") + std::to_string(at[d]);
  return s + "]";
}

std::string Deviation::text(const Tensor& like) const {
  char line[160];
  if (at < 0) return "all " + std::to_string(count) + " elements equal";
  std::snprintf(line, sizeof(line), "worst %.3g of its bound: got %.6g, expected %.6g at ", worst,
                got, want);
  std::string s = line + place(like, at);
  std::snprintf(line, sizeof(line), "; %lld of %lld outside; cosine %.2g",
                static_cast<long long>(wrong), static_cast<long long>(count), cosine);
  return s + line;
}

Deviation compare(const Tensor& got, const Tensor& want, const Bar& bar, const Tensor& magnitude) {
  const Check check("compare");
  bool same = got.rank == want.rank;
  for (int d = 0; same && d < got.rank; ++d) same = got.shape[d] == want.shape[d];
  check.that(same, "got", shape_of(want), shape_of(got));
  Deviation r;
  r.count = got.size();
  double dot = 0, norms = 0;
  for (int64_t i = 0; i < r.count; ++i) {
    const double a = element(got, i), b = element(want, i);
    if (a == b || (std::isnan(a) && std::isnan(b))) {
      if (std::isfinite(b)) {
        dot += a * b;
        norms += a * a + b * b;
      }
      continue;
    }
    double share = std::numeric_limits<double>::infinity();
    if (std::isfinite(a) && std::isfinite(b)) {
      const double d = std::abs(a - b);
      // 0 bounds (kExact) leave the share infinite: nothing but equality passes.
      share = std::min(d / bar.absolute, d / (bar.relative * std::abs(b)));
      if (magnitude) share = std::min(share, d / (kCancellation * element(magnitude, i)));
      r.largest = std::max(r.largest, d);
      dot += a * b;
      norms += a * a + b * b;
    }
    r.wrong += !(share < 1);
    if (r.at < 0 || share > r.worst) {
      r.worst = share;
      r.at = i;
      r.got = a;
      r.want = b;
    }
  }
  r.cosine = norms > 0 ? 1 - 2 * dot / norms : 0;
  r.ok = r.wrong == 0 && r.cosine < bar.cosine;
  return r;
}

}  // namespace winnow::tools
