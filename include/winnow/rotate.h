// rotate: rotary position embedding (RoPE) of 64 values of each row, forwards and back; rope_table:
// its cosines and sines.
#pragma once

#include "winnow/scale.h"
#include "winnow/tensor.h"

namespace winnow {

inline constexpr int32_t kRopeDim = 64;  // values that are rotated, in 32 pairs

// Which two of the 64 values turn together; both stay where they are.
enum class RopePairs : uint8_t {
  kInterleaved,  // (2i, 2i + 1): V3.2's q and k, everything of V4, GLM's indexer
  kHalf,         // (i, i + 32): V3.2's indexer
};

// Which 64 values of a row are rotated.
enum class RopeSlice : uint8_t { kLast, kFirst };

struct Rope {
  // [P, 2, 32] f32: cosines, then sines of position p. Any strides: vLLM's tables [P, 64] are
  // {64, 32, 1}, SGLang's pairs (cos, sin) are {64, 1, 2}.
  Tensor table = {};
  RopePairs pairs = RopePairs::kInterleaved;
  RopeSlice slice = RopeSlice::kLast;
  bool inverse = false;  // turns back: sines change their sign
};

struct RotateArgs {
  Tensor x;          // [T, H, d] bf16, d >= 64
  Tensor positions;  // [T] int32
  Rope rope;
  Tensor out;          // [T, H, d] bf16, out; may be x. Or e4m3: d is a multiple of 128 then
  Tensor scales = {};  // [T, H, d / 128] f32, out, with out in e4m3; any strides
  ScaleMode scale = ScaleMode::kDefault;  // of index keys: kPow2 (the default) or kAmax
  Target target = {};
};

// Pair (u, v) becomes (u cos - v sin, v cos + u sin), fp32 with one rounding to bf16; the other
// values are copied. An output in e4m3 holds the codes of these bf16 values, with a scale for each
// 128 of them, by the quantiser of index keys: what an fp8 projection of attention's output takes.
// A token whose position is outside [0, P) is skipped: its rows of out and scales stay as they are.
// Cost: one pass over x.
void rotate(const RotateArgs& args);

struct RopeTableArgs {
  double theta = 10000.0;
  // YaRN; factor 1 means none. Cosines and sines are not scaled: V3.2's factors cancel, V4 sets 1.
  double factor = 1.0;
  int64_t original = 0;  // positions that the model was trained with, with a factor
  double beta_fast = 32.0, beta_slow = 1.0;
  Tensor table;  // [P, 2, 32] f32, out, any strides
  Target target = {};
};

// table[p, 0, i] = cos(a), table[p, 1, i] = sin(a), a = fp32(p * f_i) with f_i in fp32: angles are
// rounded as every engine rounds them. f_i = theta^(-i/32) * ((1 - ramp_i) + ramp_i / factor),
// ramp_i = clamp((i - lo) / (hi - lo), 0, 1), lo = max(floor(k(beta_fast)), 0),
// hi = min(ceil(k(beta_slow)), 63) (+ 0.001 if equal), k(r) = 32 ln(original / (2 pi r)) / ln
// theta. Made once, at load.
void rope_table(const RopeTableArgs& args);

}  // namespace winnow
