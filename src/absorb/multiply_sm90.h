// The tensor cores' product per head: see multiply_sm90.cu.
#pragma once

#include <cuda_runtime.h>

#include "absorb/kernel.h"

namespace winnow::absorption::sm90 {

struct Tiles {
  Product p;
  int64_t row_tiles = 0, col_tiles = 0;
};

// Whether its operands can be copied 16 bytes at a time. Does not depend on the rows: a row's sums
// are formed by the same instructions in any call.
bool multiply_fits(const Product& p);
void multiply(const Product& p, cudaStream_t stream);

// Of products that fit above: whether they have the rows, and their weights the size, to be
// streamed past weights that stay (stream_sm90.cu). The same bits, faster.
bool stream_fits(const Product& p);
void stream(const Product& p, const Device& device);

}  // namespace winnow::absorption::sm90
