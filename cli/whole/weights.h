// A layer's weights: drawn at random, or read from a safetensors file by a checkpoint's names.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "whole/array.h"
#include "whole/spec.h"

namespace winnow::cli::whole {

// One tensor that a layer needs.
struct Needed {
  std::string name;   // of transformers' modules
  std::string alias;  // of DeepSeek's V4 checkpoints; "" if there is none
  std::vector<int64_t> shape;
  enum Role { kMatrix, kNorm, kOffset } role = kMatrix;  // norms draw around 1
};
std::vector<Needed> needed_by(const Spec& spec);

class Weights {
 public:
  // Normal numbers: matrices with variance 1 / columns, so that values keep their size.
  Weights(const Spec& spec, const Queue& queue, uint64_t seed);
  // From `file`, names behind `prefix`. Matrices in bf16 or f32, or in e4m3 with scales of 128 x
  // 128 (V4.1: 32 x 32) values beside them; everything else in f32 or bf16. Throws Error naming the
  // tensor that is missing or has another shape.
  Weights(const Spec& spec, const Queue& queue, const std::string& file, const std::string& prefix);

  // [rows, columns] bf16.
  Tensor matrix(const std::string& name) const;
  const bf16* matrix_on_host(const std::string& name) const;
  // f32.
  Tensor vector(const std::string& name) const;
  const float* vector_on_host(const std::string& name) const;
  double bytes() const;

 private:
  std::map<std::string, Array<bf16>> matrices_;
  std::map<std::string, Array<float>> vectors_;
  std::map<std::string, std::vector<int64_t>> shapes_;
};

}  // namespace winnow::cli::whole
