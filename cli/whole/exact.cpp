#include "whole/exact.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/formats.h"

namespace winnow::cli::whole {

namespace {

constexpr double kBf16 = 0x1p-8;  // one rounding to bf16, relative, at most
constexpr double kE4m3 = 0x1p-4;  // one to e4m3

std::vector<double> doubles(const bf16* x, int64_t count) {
  std::vector<double> out(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) out[i] = internal::core::to_float(x[i]);
  return out;
}

struct Compared {
  double error = 0, size = 0;
  int64_t count = 0;
  template <class T>
  void add(const T* got, const double* want, int64_t n) {
    for (int64_t i = 0; i < n; ++i) add(internal::core::to_float(got[i]), want[i], want[i]);
  }
  // `length`: what the roundings are relative to.
  void add(double got, double want, double length) {
    error += (got - want) * (got - want);
    size += length * length;
    ++count;
  }
};

// Not a number compares as a failure.
void record(Check& check, const Compared& c, double bound) {
  if (c.count == 0) return;
  const double deviation = std::sqrt(c.error / std::max(c.size, 1e-300));
  check.compared += c.count;
  if (!(deviation <= bound) && check.ok) {
    check.ok = false;
    check.note = fmt::format("deviation {:.3g}, at most {:.3g} expected", deviation, bound);
  }
  if (!(deviation / bound <= check.deviation / std::max(check.bound, 1e-300))) {
    check.deviation = deviation;
    check.bound = bound;
  }
}

}  // namespace

Exact::Exact(const Spec& spec, const Weights& weights, const Capacity& capacity,
             const Exact* source)
    : s_(spec),
      w_(weights),
      bf16_caches_(capacity.bf16_caches),
      source_(source),
      requests_(static_cast<size_t>(capacity.requests)) {
  const auto edge = [&](double turns) {
    return 32 * std::log(static_cast<double>(s_.original) / (2 * M_PI * turns)) /
           std::log(s_.theta);
  };
  const bool yarn = s_.factor > 1;
  const double low = yarn ? std::max(std::floor(edge(32)), 0.0) : 0;
  double high = yarn ? std::min(std::ceil(edge(1)), 63.0) : 1;
  if (high == low) high += 0.001;
  for (int i = 0; i < 32; ++i) {
    const double ramp = yarn ? std::clamp((i - low) / (high - low), 0.0, 1.0) : 0;
    frequencies_.push_back(std::pow(s_.theta, -i / 32.0) * (1 - ramp + ramp / s_.factor));
  }
}

Exact::Row Exact::times(const Row& x, int64_t rows, const std::string& name) const {
  const Tensor w = w_.matrix(name);
  const int64_t inner = w.shape[1];
  Row out(static_cast<size_t>(rows * w.shape[0]));
  multiply(Product64{.x = x.data(),
                     .w = w_.matrix_on_host(name),
                     .out = out.data(),
                     .tokens = rows,
                     .outputs = w.shape[0],
                     .inner = inner,
                     .x_stride = inner,
                     .out_stride = w.shape[0]});
  return out;
}

void Exact::norm(double* x, int64_t width, const float* weight, double eps) const {
  double squares = 0;
  for (int64_t i = 0; i < width; ++i) squares += x[i] * x[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
  for (int64_t i = 0; i < width; ++i) x[i] *= factor * (weight ? weight[i] : 1);
}

// Angles are rounded to fp32, as every engine rounds them.
void Exact::turn(double* x, int64_t position, RopePairs pairs, bool inverse) const {
  for (int i = 0; i < 32; ++i) {
    const float angle = static_cast<float>(position) * static_cast<float>(frequencies_[i]);
    const double c = std::cos(static_cast<double>(angle));
    const double s = (inverse ? -1 : 1) * std::sin(static_cast<double>(angle));
    double& u = x[pairs == RopePairs::kHalf ? i : 2 * i];
    double& v = x[pairs == RopePairs::kHalf ? i + 32 : 2 * i + 1];
    const double turned = u * c - v * s;
    v = v * c + u * s;
    u = turned;
  }
}

void Exact::append(const Batch& batch, const bf16* x) {
  const int64_t tokens = batch.tokens();
  const Row in = doubles(x, tokens * s_.hidden);
  const Row kv = times(in, tokens, s_.mla() ? "kv_a_proj_with_mqa.weight" : "kv_proj.weight");
  const bool compresses = s_.compressed() && s_.own_entries;
  const bool has_keys = s_.indexed() && s_.own_keys;
  Row keys, values, scores, key_values, key_scores;
  if (compresses) values = times(in, tokens, "compressor.kv_proj.weight");
  if (compresses && s_.gate) scores = times(in, tokens, "compressor.gate_proj.weight");
  if (has_keys && s_.mla()) keys = times(in, tokens, "indexer.wk.weight");
  if (has_keys && compresses && !s_.latent_keys) {
    key_values = times(in, tokens, "compressor.indexer.kv_proj.weight");
    key_scores = times(in, tokens, "compressor.indexer.gate_proj.weight");
  }
  const auto row = [&](const Row& all, int64_t t) {
    const int64_t width = static_cast<int64_t>(all.size()) / tokens;
    return Row(all.begin() + t * width, all.begin() + (t + 1) * width);
  };
  const auto both = [&](const Row& left, const Row& right, int64_t t) {
    Row out = row(left, t);
    if (right.empty()) return out;
    const Row behind = row(right, t);
    out.insert(out.end(), behind.begin(), behind.end());
    return out;
  };
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t position = batch.positions[static_cast<size_t>(t)];
    History& h = requests_[static_cast<size_t>(batch.requests[static_cast<size_t>(t)])];
    if (position == 0) h = {};
    append_token(h, position, row(kv, t), keys.empty() ? Row{} : row(keys, t));
    if (!compresses) continue;
    h.rows.push_back(both(values, scores, t));
    if (!key_values.empty()) h.key_rows.push_back(both(key_values, key_scores, t));
    if ((position + 1) % s_.ratio == 0) close_entry(h, position);
  }
}

void Exact::append_token(History& h, int64_t position, const Row& kv, const Row& keys) const {
  Row row = kv;
  norm(row.data(), 512, w_.vector_on_host(s_.mla() ? "kv_a_layernorm.weight" : "kv_norm.weight"),
       s_.eps);
  turn(row.data() + (s_.mla() ? 512 : 448), position, RopePairs::kInterleaved, false);
  h.kv.push_back(row);
  if (keys.empty()) return;
  Row key = keys;
  double mean = 0;
  for (const double x : key) mean += x / 128;
  for (double& x : key) x -= mean;
  norm(key.data(), 128, w_.vector_on_host("indexer.k_norm.weight"), 1e-6);
  const float* bias = w_.vector_on_host("indexer.k_norm.bias");
  for (int i = 0; i < 128; ++i) key[i] += bias[i];
  turn(key.data() + (s_.index_slice == RopeSlice::kFirst ? 0 : 64), position, s_.index_pairs,
       false);
  h.keys.push_back(key);
}

Exact::Row Exact::pooled(const std::vector<Row>& rows, int64_t position, int64_t d,
                         const float* bias) const {
  const int64_t width = s_.values() * d, last = position, first = last - s_.values() * s_.ratio + 1;
  Row out(static_cast<size_t>(d));
  for (int64_t i = 0; i < d; ++i) {
    std::vector<double> u, z;
    for (int64_t j = std::max<int64_t>(first, 0); j <= last; ++j) {
      // With overlap the earlier rows give their first half.
      const int64_t at = s_.overlap && j > last - s_.ratio ? d + i : i;
      u.push_back(rows[static_cast<size_t>(j)][static_cast<size_t>(at)]);
      double score = s_.gate ? rows[static_cast<size_t>(j)][static_cast<size_t>(width + at)] : 0;
      if (bias) score += bias[j % s_.ratio * width + at];
      z.push_back(score);
    }
    const double most = *std::max_element(z.begin(), z.end());
    double sum = 0, weighted = 0;
    for (size_t j = 0; j < z.size(); ++j) {
      sum += std::exp(z[j] - most);
      weighted += std::exp(z[j] - most) * u[j];
    }
    out[static_cast<size_t>(i)] = weighted / sum;
  }
  return out;
}

void Exact::close_entry(History& h, int64_t position) const {
  const auto bias = [&](const char* name) { return s_.bias ? w_.vector_on_host(name) : nullptr; };
  const int64_t first = position / s_.ratio * s_.ratio;
  Row latent = pooled(h.rows, position, 512, bias("compressor.position_bias"));
  norm(latent.data(), 512, w_.vector_on_host("compressor.kv_norm.weight"), s_.eps);
  Row entry = latent;
  turn(entry.data() + 448, first, RopePairs::kInterleaved, false);
  h.entries.push_back(entry);
  if (!s_.indexed() || !s_.own_keys) return;
  Row key;
  if (s_.latent_keys) {
    key = times(latent, 1, "indexer.wk.weight");
    norm(key.data(), 128, w_.vector_on_host("indexer.k_norm.weight"), s_.eps);
  } else {
    key = pooled(h.key_rows, position, 128, bias("compressor.indexer.position_bias"));
    norm(key.data(), 128, w_.vector_on_host("compressor.indexer.kv_norm.weight"), s_.eps);
  }
  turn(key.data() + 64, first, RopePairs::kInterleaved, false);
  h.keys.push_back(key);
}

// out [H, 512] of q [H, record]: over the window and the entries of these ids (V3.2: over tokens).
std::vector<double> Exact::attend(const Row& q, const History& own, const History& entries,
                                  const std::vector<int64_t>& ids, int64_t position,
                                  double& spread) const {
  std::vector<const Row*> keys;
  if (s_.window > 0)
    for (int64_t p = std::max<int64_t>(0, position - s_.window + 1); p <= position; ++p)
      keys.push_back(&own.kv[static_cast<size_t>(p)]);
  for (const int64_t id : ids)
    keys.push_back(&(s_.mla() ? own.kv : entries.entries)[static_cast<size_t>(id)]);
  const int64_t width = s_.record();
  const float* sinks = s_.mla() ? nullptr : w_.vector_on_host("sinks");
  Row out(static_cast<size_t>(s_.heads * 512));
  double squares = 0, sum_of_logits = 0;
  for (int64_t h = 0; h < s_.heads; ++h) {
    std::vector<double> logits;
    for (const Row* key : keys) {
      double dot = 0;
      for (int64_t i = 0; i < width; ++i) dot += q[h * width + i] * (*key)[i];
      logits.push_back(dot * s_.scale);
      squares += logits.back() * logits.back();
      sum_of_logits += logits.back();
    }
    double most = *std::max_element(logits.begin(), logits.end());
    if (sinks) most = std::max<double>(most, sinks[h]);
    double sum = sinks ? std::exp(sinks[h] - most) : 0;
    for (const double logit : logits) sum += std::exp(logit - most);
    for (size_t j = 0; j < keys.size(); ++j) {
      const double weight = std::exp(logits[j] - most) / sum;
      for (int64_t i = 0; i < 512; ++i) out[h * 512 + i] += weight * (*keys[j])[i];
    }
  }
  const auto count = static_cast<double>(keys.size()) * static_cast<double>(s_.heads);
  const double mean = sum_of_logits / count;
  spread = std::max(1.0, std::sqrt(std::max(0.0, squares / count - mean * mean)));
  return out;
}

// Logits against the reference's; then ids: nothing chosen may lie further below the last one that
// the reference would choose than two logits differ at most.
void Exact::check_choice(Layer& layer, const Row& index_q, const Row& weights, const History& keys,
                         int64_t token, int64_t count, Check& check) const {
  if (count == 0) return;
  const std::vector<float> got = layer.logits(token, count);
  Row want(static_cast<size_t>(count));
  double largest = 0;
  Compared c;
  for (int64_t j = 0; j < count; ++j) {
    // Terms of a logit have both signs, and few keys may all have small sums: what rounding costs
    // is relative to the terms. Those of q and k round each product, that of a weight its head.
    double squares = 0;
    for (int64_t h = 0; h < s_.index_heads; ++h) {
      double dot = 0, products = 0;
      for (int64_t i = 0; i < 128; ++i) {
        const double product = index_q[h * 128 + i] * keys.keys[static_cast<size_t>(j)][i];
        dot += product;
        products += product * product;
      }
      const double active = std::max(0.0, dot);
      want[j] += weights[h] * active;
      squares += weights[h] * weights[h] * (products + active * active);
    }
    c.add(got[j], want[j], std::sqrt(squares));
    largest = std::max(largest, std::fabs(want[j] - got[j]));
  }
  // Queries: q_a, norm, projection, RoPE; keys: up to four; weights: one.
  const double code = bf16_caches_ ? 0 : kE4m3;
  record(check, c, 9 * kBf16 + 2 * code);
  const int64_t width = layer.chosen_width();
  const int32_t* ids = layer.chosen() + token * width;
  const int64_t kept = std::min(count, width);
  Row order = want;
  std::nth_element(order.begin(), order.begin() + (kept - 1), order.end(), std::greater<>());
  for (int64_t i = 0; i < kept && check.ok; ++i) {
    if (ids[i] >= 0 && ids[i] < count && want[ids[i]] >= order[kept - 1] - 2 * largest) continue;
    check.ok = false;
    check.note = fmt::format("id {} is not among the best {}", ids[i], kept);
  }
}

void Exact::check(Layer& layer, const Batch& batch, const bf16* x, int64_t token,
                  Checks& checks) const {
  const int64_t position = batch.positions[static_cast<size_t>(token)];
  const auto request = static_cast<size_t>(batch.requests[static_cast<size_t>(token)]);
  const History& own = requests_[request];
  const History& others = (s_.own_entries ? this : source_)->requests_[request];
  const double code = bf16_caches_ ? 0 : kE4m3;
  const auto number = static_cast<int64_t>(request);

  Compared records, entries;
  const std::vector<bf16> stored = layer.records(number, position + 1);
  for (int64_t p = 0; p <= position; ++p)
    records.add(stored.data() + p * s_.record(), own.kv[static_cast<size_t>(p)].data(),
                s_.record());
  record(checks[kWrite], records, 3 * kBf16 + code);
  const int64_t count = s_.compressed() ? (position + 1) / s_.ratio : 0;
  if (s_.own_entries && count > 0) {
    const std::vector<bf16> rows = layer.entries(number, count);
    for (int64_t w = 0; w < count; ++w)
      entries.add(rows.data() + w * 512, own.entries[static_cast<size_t>(w)].data(), 512);
    record(checks[kCompress], entries, 2 * kBf16 + code);
  }

  const Row in = doubles(x + token * s_.hidden, s_.hidden);
  Row latent = times(in, 1, "q_a_proj.weight");
  norm(latent.data(), s_.q_lora,
       w_.vector_on_host(s_.mla() ? "q_a_layernorm.weight" : "q_a_norm.weight"), s_.eps);
  const Row heads = times(latent, 1, "q_b_proj.weight");
  Row q(static_cast<size_t>(s_.heads * s_.record()));
  const int64_t both = s_.nope + s_.value;
  for (int64_t h = 0; h < s_.heads; ++h) {
    const double* from = heads.data() + h * s_.head();
    double* to = q.data() + h * s_.record();
    if (s_.mla()) {
      const bf16* w_uk = w_.matrix_on_host("kv_b_proj.weight") + h * both * 512;
      for (int64_t p = 0; p < s_.nope; ++p)
        for (int64_t l = 0; l < 512; ++l)
          to[l] += from[p] * internal::core::to_float(w_uk[p * 512 + l]);
      std::copy_n(from + s_.nope, 64, to + 512);
    } else {
      std::copy_n(from, 512, to);
      if (s_.q_norm) norm(to, 512, nullptr, s_.eps);
    }
    turn(to + s_.record() - 64, position, RopePairs::kInterleaved, false);
  }
  Compared queries;
  queries.add(layer.queries() + token * s_.heads * s_.record(), q.data(), s_.heads * s_.record());
  const double query_roundings = s_.q_norm ? 5 : 4;
  record(checks[kPrepare], queries, query_roundings * kBf16);

  const int64_t seen = s_.mla() ? position + 1 : count;
  if (s_.indexed()) {
    Row index_q =
        times(latent, 1, s_.mla() ? "indexer.wq_b.weight" : "compressor.indexer.q_b_proj.weight");
    for (int64_t h = 0; h < s_.index_heads; ++h)
      turn(index_q.data() + h * 128 + (s_.index_slice == RopeSlice::kFirst ? 0 : 64), position,
           s_.index_pairs, false);
    Row weights = times(
        in, 1,
        s_.mla() ? "indexer.weights_proj.weight" : "compressor.indexer.scorer.weights_proj.weight");
    for (double& w : weights) w /= std::sqrt(static_cast<double>(s_.index_heads * 128));
    check_choice(layer, index_q, weights, s_.own_keys ? own : others, token, seen, checks[kChoose]);
  }
  std::vector<int64_t> ids;
  if (layer.chosen_width() > 0) {
    const int32_t* chosen = layer.chosen() + token * layer.chosen_width();
    for (int64_t i = 0; i < layer.chosen_width(); ++i)
      if (chosen[i] >= 0 && chosen[i] < seen) ids.push_back(chosen[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) ids.push_back(i);
  }

  double spread = 1;
  Row out = attend(q, own, others, ids, position, spread);
  Compared attended;
  attended.add(layer.attended() + token * s_.heads * 512, out.data(), s_.heads * 512);
  // What moves a logit moves its weight; values carry the records' roundings once more.
  const double key_error = 3 * kBf16 + code;
  const double bound = spread * (query_roundings * kBf16 + key_error) + key_error + kBf16;
  record(checks[kAttend], attended, bound);

  Row low;
  if (s_.mla()) {
    for (int64_t h = 0; h < s_.heads; ++h)
      for (int64_t v = 0; v < s_.value; ++v) {
        const bf16* w_uv = w_.matrix_on_host("kv_b_proj.weight") + (h * both + s_.nope + v) * 512;
        double sum = 0;
        for (int64_t l = 0; l < 512; ++l)
          sum += out[h * 512 + l] * internal::core::to_float(w_uv[l]);
        low.push_back(sum);
      }
  } else {
    for (int64_t h = 0; h < s_.heads; ++h)
      turn(out.data() + h * 512 + 448, position, RopePairs::kInterleaved, true);
    const int64_t inner = s_.heads * 512 / s_.groups;
    for (int64_t g = 0; g < s_.groups; ++g)
      for (int64_t r = 0; r < s_.rank; ++r) {
        const bf16* w = w_.matrix_on_host("o_a_proj.weight") + (g * s_.rank + r) * inner;
        double sum = 0;
        for (int64_t i = 0; i < inner; ++i)
          sum += out[g * inner + i] * internal::core::to_float(w[i]);
        low.push_back(sum);
      }
  }
  const Row y = times(low, 1, s_.mla() ? "o_proj.weight" : "o_b_proj.weight");
  layer.y().to_host();
  Compared results;
  results.add(layer.y().host() + token * s_.hidden, y.data(), s_.hidden);
  record(checks[kProjectOutput], results, bound + 3 * kBf16);
}

}  // namespace winnow::cli::whole
