// Several layers of a model, one after the other, each with its reference in fp64.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "random.h"
#include "whole/exact.h"
#include "whole/layer.h"

namespace winnow::cli::whole {

struct StackOptions {
  std::string weights, prefix;  // a file and the prefix of its names; "" draws the weights
  uint64_t seed = 1;
  bool cuda = false, check = true;
};

class Stack {
 public:
  // Layers of one kind share their weights: a layer of V4 Pro has 0.6 GB of them.
  Stack(const std::vector<Spec>& specs, const Capacity& capacity, const StackOptions& options);

  // Draws x, normalised, and takes it through all layers: each one's input is the normalised sum of
  // the last one's input and output.
  void run(const Batch& batch);
  // Tokens that a prefix cache would have brought.
  void fill(const Batch& batch);
  // The last run against the reference, at its first and its last token.
  void check();

  int64_t size() const { return static_cast<int64_t>(layers_.size()); }
  Layer& layer(int64_t i) { return *layers_[static_cast<size_t>(i)]; }
  const Checks& checks(int64_t i) const { return checks_[static_cast<size_t>(i)]; }
  bool ok() const;

 private:
  void draw(Array<bf16>& x, int64_t tokens);

  StackOptions options_;
  Queue queue_;
  tools::Random random_;
  Batch batch_;
  std::map<std::string, std::shared_ptr<const Weights>> weights_;
  std::vector<std::unique_ptr<Layer>> layers_;
  std::vector<std::unique_ptr<Exact>> exact_;
  std::vector<Array<bf16>> inputs_;
  std::vector<Checks> checks_;
};

}  // namespace winnow::cli::whole
