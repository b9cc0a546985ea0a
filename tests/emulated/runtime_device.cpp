// The device of the CUDA runtime, an H200, and the one function of its driver that winnow takes.
#include <cuda.h>

#include <cstring>

#include "runtime.h"
#include "tensor_map.h"

namespace winnow::emulated {

namespace {

constexpr int kMaxGrid = 65535;

// Of an attribute; -1: not known.
int value_of(cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMultiProcessorCount: return kMultiprocessors;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrMaxGridDimX: return INT32_MAX;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return kMaxGrid;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 * 1024;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return kMostShared;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 228 * 1024;
    case cudaDevAttrL2CacheSize: return 60 << 20;
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrCanMapHostMemory: return 1;
    default: return -1;
  }
}

size_t bytes_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 8;
    default: return 0;
  }
}

uint8_t span_of(CUtensorMapSwizzle swizzle) {
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_32B: return 32;
    case CU_TENSOR_MAP_SWIZZLE_64B: return 64;
    case CU_TENSOR_MAP_SWIZZLE_128B: return 128;
    default: return 0;
  }
}

// cuTensorMapEncodeTiled(), with the limits that its documentation names.
CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box,
                const cuuint32_t* steps, CUtensorMapInterleave interleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  const size_t element = bytes_of(type);
  if (element == 0 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE || swizzle > CU_TENSOR_MAP_SWIZZLE_128B)
    return CUDA_ERROR_NOT_SUPPORTED;
  if (!map || reinterpret_cast<uintptr_t>(map) % 64 || rank < 1 || rank > 5)
    return CUDA_ERROR_INVALID_VALUE;
  if (!base || reinterpret_cast<uintptr_t>(base) % 16) return CUDA_ERROR_INVALID_VALUE;
  TensorMap made;
  made.rank = static_cast<uint8_t>(rank);
  made.element_bytes = static_cast<uint8_t>(element);
  made.swizzle = span_of(swizzle);
  made.base = reinterpret_cast<uint64_t>(base);
  made.stride[0] = element;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (steps[i] != 1) return CUDA_ERROR_NOT_SUPPORTED;
    if (shape[i] == 0 || shape[i] > UINT32_MAX || box[i] == 0 || box[i] > 256)
      return CUDA_ERROR_INVALID_VALUE;
    made.shape[i] = static_cast<uint32_t>(shape[i]);
    made.box[i] = box[i];
    if (i == 0) continue;
    const cuuint64_t stride = strides[i - 1];
    if (stride % 16 || stride >= cuuint64_t{1} << 40) return CUDA_ERROR_INVALID_VALUE;
    made.stride[i] = stride;
  }
  const size_t row = box[0] * element;
  if (row % 16 || (made.swizzle > 0 && row > made.swizzle)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace winnow::emulated

using namespace winnow::emulated;

extern "C" {

// These two need no context: they answer after a fault, too.
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  return call(Waits::kNo, [&] { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; });
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return call(Waits::kNo, [&] {
    if (device != 0) return cudaErrorInvalidDevice;
    const int known = value_of(attribute);
    if (!value || known < 0) return cudaErrorInvalidValue;
    *value = known;
    return cudaSuccess;
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  return call(Waits::kNo, [&] {
    if (!symbol || !function) return cudaErrorInvalidValue;
    const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
    *function = known ? reinterpret_cast<void*>(&encode) : nullptr;
    if (result) *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
  });
}
}
