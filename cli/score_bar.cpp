#include "score_bar.h"

#include <algorithm>
#include <cmath>

#include "core/formats.h"
#include "model/index.h"
#include "winnow/model.h"

namespace winnow::cli {

namespace {

// |s_k| * sum_h |w_h| * (128 u * sum_i |q_hi k_i| + (H_I + 2) u * max(0, q_h . k)), u = 2^-24.
double bound(const ScoreArgs& a, int64_t t, const float* key, float scale) {
  const bool is_bf16 = a.q.dtype == DType::kBf16;
  const int64_t first = t * a.q.stride[0];
  const auto query = [&](int64_t i) {
    return is_bf16 ? to_float(static_cast<const bf16*>(a.q.data)[first + i])
                   : to_float(static_cast<const e4m3*>(a.q.data)[first + i]);
  };
  const auto* w = static_cast<const float*>(a.weights.data) + t * a.weights.stride[0];
  const int64_t heads = a.q.shape[1];
  double sum = 0;
  for (int64_t h = 0; h < heads; ++h) {
    double dot = 0, magnitude = 0;
    for (int i = 0; i < kIndexDim; ++i) {
      const double product = static_cast<double>(query(h * a.q.stride[1] + i)) * key[i];
      dot += product;
      magnitude += std::abs(product);
    }
    sum += std::abs(w[h]) *
           (kIndexDim * magnitude + static_cast<double>(heads + 2) * std::max(0.0, dot));
  }
  return 0x1p-24 * std::abs(scale) * sum;
}

// The key at place `off` of a page; returns its scale.
float read_key(const Cache& keys, const std::byte* page, int64_t off, float* key) {
  if (keys.format == CacheFormat::kIndexKeysBf16) {
    const auto* row = reinterpret_cast<const bf16*>(page + IndexKeysBf16::row(off, keys.page));
    for (int i = 0; i < kIndexDim; ++i) key[i] = to_float(row[i]);
    return 1;
  }
  const auto* codes = reinterpret_cast<const e4m3*>(page + IndexKeys::row(off, keys.page));
  for (int i = 0; i < kIndexDim; ++i) key[i] = to_float(codes[i]);
  return *reinterpret_cast<const float*>(page + IndexKeys::scales(off, keys.page));
}

}  // namespace

tools::Deviation compare_scores(const ScoreArgs& a, int64_t t, const Tensor& want, int64_t step) {
  tools::Deviation r;
  const int64_t end = static_cast<const int32_t*>(a.ends.data)[t];
  const int32_t request = static_cast<const int32_t*>(a.requests.data)[t];
  const auto* table =
      static_cast<const int32_t*>(a.block_table.data) + request * a.block_table.stride[0];
  const int64_t page_stride =
      a.keys.page_stride ? a.keys.page_stride : page_bytes(a.keys.format, a.keys.page);
  for (int64_t j = 0; j < std::min(end, a.logits.shape[1]); j += step) {
    const auto* page =
        static_cast<const std::byte*>(a.keys.data) + table[j / a.keys.page] * page_stride;
    const int64_t off = j % a.keys.page;
    float key[kIndexDim];
    const float scale = read_key(a.keys, page, off, key);
    const double got = static_cast<const float*>(a.logits.data)[t * a.logits.stride[0] + j];
    const double expected = static_cast<const float*>(want.data)[j];
    ++r.count;
    if (got == expected) continue;
    const double share = std::abs(got - expected) / bound(a, t, key, scale);
    r.largest = std::max(r.largest, std::abs(got - expected));
    r.wrong += !(share <= 1);
    if (r.at < 0 || !(share <= r.worst)) r.worst = share, r.at = j, r.got = got, r.want = expected;
  }
  r.ok = r.wrong == 0;
  return r;
}

}  // namespace winnow::cli
