#include "cuda/tensor_map.h"

namespace winnow::internal::cuda {

namespace {

// The driver's function, requested at run time: the library does not link the driver.
auto encoder() {
  static const auto known = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                     &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        result == cudaDriverEntryPointSuccess ? found : nullptr);
  }();
  return known;
}

}  // namespace

bool describe(CUtensorMap& map, const Boxed& t) {
  if (!encoder()) return false;
  cuuint64_t shape[3], stride[2];
  for (int i = 0; i < 3; i++) {
    if (t.shape[i] <= 0 || t.shape[i] > INT32_MAX) return false;
    shape[i] = static_cast<cuuint64_t>(t.shape[i]);
  }
  for (int i = 0; i < 2; i++) {
    // One row or plane has no stride.
    const int64_t elements = t.shape[i + 1] == 1 ? 8 : t.stride[i];
    if (elements <= 0 || elements >= int64_t{1} << 39) return false;
    stride[i] = 2 * static_cast<cuuint64_t>(elements);
  }
  const cuuint32_t box[3] = {64, t.rows, 1}, step[3] = {1, 1, 1};
  return encoder()(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<bf16*>(t.data), shape,
                   stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace winnow::internal::cuda
