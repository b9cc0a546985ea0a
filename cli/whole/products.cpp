// Blocked over four tokens and four outputs, so that a register tile is read once for eight values
// of operands; threads share the outputs. Compiled once for each set of vectors and chosen at run
// time.
#include "whole/products.h"

#include <algorithm>
#include <cstring>

#include "core/formats.h"
#include "cpu/threads.h"
#include "winnow/absorb.h"
#include "winnow/error.h"

#ifdef WINNOW_WITH_CUBLAS
#include <cublas_v2.h>
#endif

namespace winnow::cli::whole {

namespace {

constexpr int kTile = 4;  // tokens, and outputs

// Outputs [first, first + count) of all tokens; `rows` holds their weights, converted.
template <class T, int Lanes>
[[gnu::always_inline]] inline void block(const ProductIn<T>& p, const T* rows, int64_t first,
                                         int64_t count) {
  typedef T Vector __attribute__((vector_size(Lanes * sizeof(T)), aligned(sizeof(T))));
  const int64_t inner = p.inner;
  for (int64_t t = 0; t < p.tokens; t += kTile) {
    // In place of tokens past the last one its row is read again, and the result dropped.
    const T* at[kTile];
    for (int i = 0; i < kTile; ++i) at[i] = p.x + std::min(t + i, p.tokens - 1) * p.x_stride;
    Vector sums[kTile][kTile] = {};
    int64_t k = 0;
    for (; k + Lanes <= inner; k += Lanes) {
      Vector left[kTile];
#pragma GCC unroll 4
      for (int i = 0; i < kTile; ++i) left[i] = *reinterpret_cast<const Vector*>(at[i] + k);
#pragma GCC unroll 4
      for (int j = 0; j < kTile; ++j) {
        const Vector right = *reinterpret_cast<const Vector*>(rows + j * inner + k);
#pragma GCC unroll 4
        for (int i = 0; i < kTile; ++i) sums[i][j] += left[i] * right;
      }
    }
    for (int i = 0; i < kTile && t + i < p.tokens; ++i)
      for (int j = 0; j < count; ++j) {
        T sum = 0;
        for (int l = 0; l < Lanes; ++l) sum += sums[i][j][l];
        for (int64_t rest = k; rest < inner; ++rest) sum += at[i][rest] * rows[j * inner + rest];
        p.out[(t + i) * p.out_stride + first + j] = sum;
      }
  }
}

template <class T>
using Block = void (*)(const ProductIn<T>&, const T*, int64_t, int64_t);

template <class T>
void any_block(const ProductIn<T>& p, const T* rows, int64_t first, int64_t count) {
  block<T, 16 / sizeof(T)>(p, rows, first, count);
}
#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2,fma"))) void avx2_block(const ProductIn<T>& p, const T* rows,
                                                    int64_t first, int64_t count) {
  block<T, 32 / sizeof(T)>(p, rows, first, count);
}
template <class T>
__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))) void avx512_block(
    const ProductIn<T>& p, const T* rows, int64_t first, int64_t count) {
  block<T, 64 / sizeof(T)>(p, rows, first, count);
}
#endif

template <class T>
Block<T> best_block() {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq"))
    return avx512_block<T>;
  if (avx2) return avx2_block<T>;
#endif
  return any_block<T>;
}

template <class T>
void multiply_all(const ProductIn<T>& p) {
  static const Block<T> run = best_block<T>();
  const int64_t blocks = (p.outputs + kTile - 1) / kTile;
  std::vector<std::vector<T>> rows(static_cast<size_t>(internal::cpu::threads()),
                                   std::vector<T>(static_cast<size_t>(kTile * p.inner)));
  internal::cpu::parallel_for(blocks, [&](int64_t b, int worker) {
    std::vector<T>& own = rows[static_cast<size_t>(worker)];
    const int64_t first = b * kTile, count = std::min<int64_t>(kTile, p.outputs - first);
    for (int64_t i = 0; i < count * p.inner; ++i)
      own[static_cast<size_t>(i)] = internal::core::to_float(p.w[first * p.inner + i]);
    run(p, own.data(), first, count);
  });
}

}  // namespace

void multiply(const Product& p) { multiply_all(p); }
void multiply(const Product64& p) { multiply_all(p); }

#ifdef WINNOW_WITH_CUBLAS
namespace {
void expect_success(cublasStatus_t status, const char* what) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(ErrorCode::kRuntime,
                std::string("layer: ") + what + ": cuBLAS: " + cublasGetStatusString(status));
}
}  // namespace
#endif

Gemm::Gemm(const Queue& queue) {
  if (!queue.cuda()) return;
#ifdef WINNOW_WITH_CUBLAS
  cublasHandle_t handle = nullptr;
  expect_success(cublasCreate(&handle), "start");
  handle_ = handle;
  expect_success(cublasSetStream(handle, static_cast<cudaStream_t>(queue.device().stream)),
                 "stream");
#else
  throw Error(
      ErrorCode::kUnsupported,
      "layer: --device cuda: this program was built without cuBLAS, which multiplies there");
#endif
}

Gemm::~Gemm() {
#ifdef WINNOW_WITH_CUBLAS
  if (handle_) cublasDestroy(static_cast<cublasHandle_t>(handle_));
#endif
}

void Gemm::operator()(const Tensor& x, const Tensor& w, const Tensor& out) {
  const int64_t tokens = x.shape[0], inner = x.shape[1], outputs = w.shape[0];
  if (tokens == 0) return;
#ifdef WINNOW_WITH_CUBLAS
  if (handle_) {
    const float one = 1, zero = 0;
    const cudaDataType_t type = out.dtype == DType::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
    expect_success(
        cublasGemmEx(static_cast<cublasHandle_t>(handle_), CUBLAS_OP_T, CUBLAS_OP_N,
                     static_cast<int>(outputs), static_cast<int>(tokens), static_cast<int>(inner),
                     &one, w.data, CUDA_R_16BF, static_cast<int>(w.stride[0]), x.data, CUDA_R_16BF,
                     static_cast<int>(x.stride[0]), &zero, out.data, type,
                     static_cast<int>(out.stride[0]), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "projection");
    return;
  }
#endif
  x_.resize(static_cast<size_t>(tokens * inner));
  const auto* from = static_cast<const bf16*>(x.data);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t i = 0; i < inner; ++i)
      x_[static_cast<size_t>(t * inner + i)] = internal::core::to_float(from[t * x.stride[0] + i]);
  const bool rounds = out.dtype == DType::kBf16;
  if (rounds) out_.resize(static_cast<size_t>(tokens * outputs));
  multiply(Product{.x = x_.data(),
                   .w = static_cast<const bf16*>(w.data),
                   .out = rounds ? out_.data() : static_cast<float*>(out.data),
                   .tokens = tokens,
                   .outputs = outputs,
                   .inner = inner,
                   .x_stride = inner,
                   .out_stride = rounds ? outputs : out.stride[0]});
  if (!rounds) return;
  auto* to = static_cast<bf16*>(out.data);
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t o = 0; o < outputs; ++o)
      to[t * out.stride[0] + o] =
          internal::core::to_bf16(out_[static_cast<size_t>(t * outputs + o)]);
}

void Gemm::groups(const Tensor& x, const Tensor& w, const Tensor& out) {
  const int64_t groups = x.shape[1], inner = x.shape[2], outputs = w.shape[1];
#ifdef WINNOW_WITH_CUBLAS
  if (handle_) {
    const float one = 1, zero = 0;
    expect_success(
        cublasGemmStridedBatchedEx(
            static_cast<cublasHandle_t>(handle_), CUBLAS_OP_T, CUBLAS_OP_N,
            static_cast<int>(outputs), static_cast<int>(x.shape[0]), static_cast<int>(inner), &one,
            w.data, CUDA_R_16BF, static_cast<int>(inner), outputs * inner, x.data, CUDA_R_16BF,
            static_cast<int>(x.stride[0]), x.stride[1], &zero, out.data, CUDA_R_16BF,
            static_cast<int>(out.stride[0]), out.stride[1], static_cast<int>(groups),
            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
        "grouped projection");
    return;
  }
#endif
  project_output({.attn = x,
                  .w_uv = tensor(static_cast<bf16*>(w.data), {inner, groups, outputs},
                                 {1, outputs * inner, inner}),
                  .out = out});
}

}  // namespace winnow::cli::whole
