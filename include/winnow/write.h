// write: latent KV of new tokens -> quantised records in the paged cache; and back.
#pragma once

#include "winnow/model.h"
#include "winnow/norm.h"
#include "winnow/rotate.h"
#include "winnow/scale.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

// What happens to a row before it becomes a record, step by step; each step rounds to bf16.
struct Prologue {
  // Of the first 512 values (index keys: of all 128). Default: no norm.
  Norm norm = {.kind = NormKind::kNone};
  Rope rope = {};         // without a table: none
  Tensor positions = {};  // [T] int32, with rope
  bool hadamard = false;  // index keys: after RoPE
};

struct WriteArgs {
  // Optional: gives kernel and device.
  const Plan* plan = nullptr;
  // [N >= T, d] bf16 with d of the record (576, 512; 128 for index keys), or [N, d_nope] when rope
  // is given; rows of any stride.
  Tensor kv;
  Tensor rope = {};  // [N >= T, d_rope] bf16, optional
  Tensor slots;      // [T] int64; a negative slot skips its token (padding)
  Cache cache;       // the pages to write to; the format says what is written
  ScaleMode scale = ScaleMode::kDefault;
  // Given where kv and rope are a projection's output: the steps from there to what is stored.
  Prologue prologue = {};
  Target target = {};
};

// Quantises token i of kv into slot slots[i] of the cache (docs/cache-format.md). Only the bytes of
// written records change; page padding does not. The slots of a call should differ: a slot that is
// written twice ends with either record or bytes of both. bf16 formats are copied, scale ignored.
// Slots >= pages * page: on the CPU an Error before anything is written, on CUDA they are skipped.
// A NaN becomes an e4m3 NaN and does not count for its tile's maximum. An infinity counts as the
// largest finite float and becomes +-448, so the scale stays finite and gather() gives the infinity
// back. With a prologue the bytes are those of norm(), rotate() and write(); a token whose position
// is outside the table of RoPE is skipped. Cost: one pass over kv.
void write(const WriteArgs& args);

struct GatherArgs {
  const Plan* plan = nullptr;
  Cache cache;             // any latent format
  Tensor block_table;      // [R, W] int32: page ids of each request
  Tensor starts = {};      // [R] int32: first token of each request, optional (0)
  Tensor lengths;          // [R] int32: tokens of each request, may be 0
  Tensor out_starts = {};  // [R] int32: first row of each request in out, optional (prefix sum)
  Tensor out;              // [N, d] bf16
  Target target = {};
};

// Tokens [start_i, start_i + length_i) of each request, paged -> contiguous bf16: bf16(e4m3 *
// scale), RoPE bit for bit. A token whose page id is missing or outside the cache becomes a row of
// zeros. Rows outside [0, N) are not written, and rows of out that no request covers do not change.
// A row that two requests cover ends with values of either. Lengths below 0 count as 0.
void gather(const GatherArgs& args);

struct JoinArgs {
  Tensor latent;  // [T, H, d_nope] bf16, any strides
  Tensor rope;    // [T, H, d_rope] bf16, any strides
  Tensor out;     // [T, H, d_nope + d_rope] bf16
  Target target = {};
};

// out = latent || rope. attend() also takes the two halves as they are, without this copy.
void join(const JoinArgs& args);

struct QuantizeArgs {
  Tensor x;      // [...] bf16 or f32, contiguous
  Tensor out;    // the same shape, e4m3
  Tensor scale;  // [1] f32: the factor that undoes it
  Target target = {};
};

// Whole-tensor dynamic quantisation: s = 448 / max(max|x|, 1e-10), out = e4m3(clamp(x * s, +-448)),
// scale = 1/s. A NaN in x stays NaN in out and does not enter the maximum; an infinity enters it as
// the largest finite float and becomes +-448.
void quantize(const QuantizeArgs& args);

}  // namespace winnow
