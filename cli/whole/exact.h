// The same layer in fp64: every formula of docs/layers.md without its roundings, from the layer's x
// and weights. What the layer chose is taken from it; the choice itself is checked by the logits.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "whole/layer.h"

namespace winnow::cli::whole {

// How far a step's result is from the reference: the length of the vector got - want divided by
// that of want, over all values compared; and the bound that the roundings up to there allow.
struct Check {
  double deviation = 0, bound = 0;
  int64_t compared = 0;  // values
  bool ok = true;
  std::string note;  // of the first failure
};
using Checks = std::array<Check, kTimed>;

class Exact {
 public:
  // `source`: the reference of the layer whose entries and index keys this one reads.
  Exact(const Spec& spec, const Weights& weights, const Capacity& capacity, const Exact* source);

  // The step's keys and entries. A request begins anew at position 0.
  void append(const Batch& batch, const bf16* x);
  // Compares the layer's last run, which had this batch and x, at one of its tokens.
  void check(Layer& layer, const Batch& batch, const bf16* x, int64_t token, Checks& checks) const;

 private:
  using Row = std::vector<double>;
  struct History {
    std::vector<Row> kv, rows, key_rows, entries, keys;
  };
  // W x for rows of x side by side.
  Row times(const Row& x, int64_t rows, const std::string& name) const;
  void norm(double* x, int64_t width, const float* weight, double eps) const;
  void turn(double* x, int64_t position, RopePairs pairs, bool inverse) const;  // 64 values
  void append_token(History& h, int64_t position, const Row& kv, const Row& keys) const;
  void close_entry(History& h, int64_t position) const;
  Row pooled(const std::vector<Row>& rows, int64_t position, int64_t d, const float* bias) const;
  std::vector<double> attend(const Row& q, const History& own, const History& entries,
                             const std::vector<int64_t>& ids, int64_t position,
                             double& spread) const;
  void check_choice(Layer& layer, const Row& index_q, const Row& weights, const History& keys,
                    int64_t token, int64_t count, Check& check) const;

  const Spec& s_;
  const Weights& w_;
  bool bf16_caches_;
  const Exact* source_;
  std::vector<History> requests_;
  std::vector<double> frequencies_;
};

}  // namespace winnow::cli::whole
