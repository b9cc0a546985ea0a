// Views: tensors, paged caches and devices. winnow owns none of the memory they point to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <type_traits>

namespace winnow {

// Storage types. Arithmetic happens in fp32; these only carry bits.
struct bf16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};

enum class DType : uint8_t { kBf16, kE4m3, kF32, kI32, kI64, kU8 };

constexpr int64_t size_of(DType t) {
  return t == DType::kI64                       ? 8
         : t == DType::kF32 || t == DType::kI32 ? 4
         : t == DType::kBf16                    ? 2
                                                : 1;
}

template <class T>
constexpr DType dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, bf16>) return DType::kBf16;
  else if constexpr (std::is_same_v<U, e4m3>) return DType::kE4m3;
  else if constexpr (std::is_same_v<U, float>) return DType::kF32;
  else if constexpr (std::is_same_v<U, int32_t>) return DType::kI32;
  else if constexpr (std::is_same_v<U, int64_t>) return DType::kI64;
  else {
    static_assert(std::is_same_v<U, uint8_t> || std::is_same_v<U, std::byte>, "no winnow dtype");
    return DType::kU8;
  }
}

// A strided view of up to four dimensions. Strides count elements and may be anything the stage
// allows (the innermost dimension must usually be contiguous). A default-constructed view means
// "not given"; a view with a zero in its shape is given and empty, and its data may be null.
// Outputs that overlap each other or what a call reads are an Error, unless its header allows it.
struct Tensor {
  void* data = nullptr;
  DType dtype = DType::kU8;
  int rank = 0;
  std::array<int64_t, 4> shape{};
  std::array<int64_t, 4> stride{};

  explicit operator bool() const { return rank > 0 || data != nullptr; }
  int64_t size() const {
    int64_t n = rank > 0 ? 1 : 0;
    for (int i = 0; i < rank; ++i) n *= shape[static_cast<size_t>(i)];
    return n;
  }
};

// A contiguous view: tensor(q, {tokens, heads, 576}).
template <class T>
Tensor tensor(T* data, std::initializer_list<int64_t> shape) {
  Tensor t{const_cast<std::remove_const_t<T>*>(data), dtype_of<T>(),
           static_cast<int>(shape.size())};
  size_t i = 0;
  for (int64_t n : shape)
    if (i < 4) t.shape[i++] = n;
  int64_t stride = 1;
  while (i-- > 0) {
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// A view with strides of its own, in elements.
template <class T>
Tensor tensor(T* data, std::initializer_list<int64_t> shape,
              std::initializer_list<int64_t> stride) {
  Tensor t = tensor(data, shape);
  size_t i = 0;
  for (int64_t n : stride)
    if (i < 4) t.stride[i++] = n;
  return t;
}

// Where a call runs. On CUDA every pointer of the call is a device pointer and the work is queued
// on `stream` (a cudaStream_t) of device `index`.
enum class DeviceKind : uint8_t { kCpu, kCuda };
struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  void* stream = nullptr;
};
inline Device cpu() { return {}; }
inline Device cuda(void* stream = nullptr, int index = 0) {
  return {DeviceKind::kCuda, index, stream};
}

// Where a call without a plan runs, and with which kernel. `kernel` names one of the stage's
// kernels ("reference", "simd", ...). Null means WINNOW_KERNEL if that is set, else the fastest
// kernel that fits.
struct Target {
  Device device = {};
  const char* kernel = nullptr;
};

// The byte formats of a cache record (docs/cache-format.md draws them).
enum class CacheFormat : uint8_t {
  kV32Fp8,     // 656 B: 512 e4m3, four fp32 scales, 64 bf16 RoPE
  kV32Bf16,    // 1,152 B: 576 bf16
  kV4Fp8,      // 584 B, split inside a page: 448 e4m3 + 64 bf16 RoPE rows, then 8-byte ue8m0 scales
  kV4Bf16,     // 1,024 B: 512 bf16
  kIndexKeys,  // 132 B, split inside a page: 128 e4m3 rows, then fp32 scales
  kIndexKeysBf16,  // 256 B: 128 bf16
};

// A paged cache: page p starts at data + p * page_stride and holds `page` tokens. Slot s is token
// s % page of page s / page. A contiguous bf16 KV of n rows is a cache of one page of n tokens.
// Alignment of data and page_stride: on the CPU that of the largest element, 4 bytes where scales
// are fp32 (kV32Fp8, kIndexKeys), else 2; on CUDA 16 (kIndexKeys: 4).
struct Cache {
  void* data = nullptr;
  CacheFormat format = CacheFormat::kV32Fp8;
  int64_t pages = 0;
  int32_t page = 64;
  int64_t page_stride = 0;  // bytes; 0 means page_bytes(format, page)

  explicit operator bool() const { return page > 0 && (data != nullptr || pages > 0); }
};

}  // namespace winnow
