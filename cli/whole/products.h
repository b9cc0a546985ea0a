// Projections: out = x W^T. On the CPU by plain loops over vectors, on CUDA by cuBLAS.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "soak_device.h"
#include "winnow/tensor.h"

namespace winnow::cli::whole {

// out[t, o] = sum_i x[t, i] w[o, i], summed in T. `w` has rows of `inner` values.
template <class T>
struct ProductIn {
  const T* x = nullptr;
  const bf16* w = nullptr;
  T* out = nullptr;
  int64_t tokens = 0, outputs = 0, inner = 0;
  int64_t x_stride = 0, out_stride = 0;
};
using Product = ProductIn<float>;
using Product64 = ProductIn<double>;
void multiply(const Product& p);
void multiply(const Product64& p);

// The GEMMs of a layer, on the device of its queue.
class Gemm {
 public:
  // Throws Error(kUnsupported) on CUDA if the program was built without cuBLAS.
  explicit Gemm(const Queue& queue);
  ~Gemm();
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;

  // out [T, O] = x [T, I] w [O, I]^T; x bf16 with rows of any stride, out bf16 (rounded once) or
  // f32.
  void operator()(const Tensor& x, const Tensor& w, const Tensor& out);
  // V4's grouped projection: out[t, g] = x[t, g] w[g]^T with x [T, G, I], w [G, O, I], out
  // [T, G, O]. On the CPU project_output(), where a head is a group and the weight a view.
  void groups(const Tensor& x, const Tensor& w, const Tensor& out);

 private:
  std::vector<float> x_, out_;
  [[maybe_unused]] void* handle_ = nullptr;  // of cuBLAS
};

}  // namespace winnow::cli::whole
