// Whether two strided views share memory, from their addresses, shapes and strides alone.
#pragma once

#include <array>
#include <cstdint>

#include "core/namespaces.h"
#include "winnow/tensor.h"

namespace winnow::internal::core {

// The dimensions of several elements by rising stride, then {0, 1} for the others.
struct Dimension {
  int64_t stride = 0, count = 1;
};
std::array<Dimension, 4> dimensions_of(const Tensor& t);

// The addresses from a view's first byte to one past its last; none of an empty view.
struct Addresses {
  uintptr_t begin = 0;
  int64_t bytes = 0;

  bool meet(const Addresses& other) const {
    return begin <= other.begin ? other.begin - begin < static_cast<uintptr_t>(bytes)
                                : begin - other.begin < static_cast<uintptr_t>(other.bytes);
  }
};
Addresses addresses_of(const Tensor& t);

// The same elements, each at the same index.
bool same_view(const Tensor& a, const Tensor& b);

// Whether some byte belongs to both. Views that interleave, such as two ranges of the columns of
// one matrix, share none. Exact for views that reshaping and slicing make; of strides that
// interlock in more ways than kMostTries the answer is no. Strides must not be negative.
bool share_bytes(const Tensor& a, const Tensor& b);
inline constexpr int kMostTries = 256;

}  // namespace winnow::internal::core
