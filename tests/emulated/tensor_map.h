// What the pretended driver writes into the 128 bytes of a CUtensorMap, and cp.async.bulk.tensor
// reads. Bytes outside of the tensor are zeros.
#pragma once

#include <cstdint>

namespace winnow::emulated {

struct TensorMap {
  static constexpr uint32_t kMagic = 0x77746d31;
  uint32_t magic = kMagic;
  uint8_t rank = 0, element_bytes = 0;
  uint8_t swizzle = 0;  // 0: none, else bytes of the span: 32, 64, 128
  uint8_t unused = 0;
  uint64_t base = 0;
  uint32_t shape[5] = {};   // elements, innermost first
  uint32_t box[5] = {};     // elements
  uint64_t stride[5] = {};  // bytes; stride[0] is that of an element
};
static_assert(sizeof(TensorMap) <= 128);

}  // namespace winnow::emulated
