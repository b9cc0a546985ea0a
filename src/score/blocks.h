// What the CPU kernels of score share: who computes which (token block, key block), and how keys
// come from their pages into a dequantised block. A kernel brings an Engine: its number format, and
// the product of one packed query with one block of dequantised keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "score/kernel.h"
#include "winnow/model.h"

namespace winnow::internal::score {

inline constexpr int kBlockKeys = 64;  // dequantised at a time: 16 KB of bf16, 32 KB of fp32
inline constexpr int kGroupKeys = 16;  // engines compute whole groups

// One token's query with a block of keys: out[j] = scales[j] * sum_h w_h * max(0, q_h . k_j) for
// j < count rounded up to kGroupKeys. A logit must not depend on where its key stands in the block.
struct Block {
  const std::byte* query;
  const std::byte* keys;
  const float* scales;
  float* out;
  int32_t heads, count;
  // What the next block will be made from, to be fetched meanwhile; may be empty.
  std::span<const uint8_t> ahead = {};
};

struct Engine {
  int32_t value_bytes;                    // of a dequantised key's value
  int64_t (*query_bytes)(int32_t heads);  // packed, with its weights; a multiple of 64
  void (*pack)(const Params& p, int64_t token, std::byte* out) noexcept;
  void (*dequantize)(const Run& run, std::byte* out) noexcept;
  void (*block)(const Block& b) noexcept;
  // Runs a worker's whole share, for engines that set the thread up first; may be null.
  void (*around)(void (*work)(void*), void* context) noexcept = nullptr;
  bool fetches = false;  // whether block() asks for `ahead`
};

// score() by an engine, over all tokens and keys.
void run_blocks(const Params& p, const Engine& engine) noexcept;

}  // namespace winnow::internal::score
