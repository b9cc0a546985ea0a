// compress: V4's compressor. Projected rows of new tokens -> one record for every `ratio` tokens,
// and the rows that later tokens will need -> the compressor's state.
#pragma once

#include "winnow/norm.h"
#include "winnow/rotate.h"
#include "winnow/tensor.h"
#include "winnow/write.h"

namespace winnow {

// Rows of earlier tokens, keyed by position: rewriting a position repairs it, so chunked prefill,
// rejected drafts and replayed graphs need no special case. The row of position p of request r is
//   paged  rows[table[r][p / block]][p % block]
//   ring   rows[table[r][0]][p % block], or rows[r][p % block] without a table
// A row holds e * d values, then their e * d gate scores with the bias added.
struct CompressorState {
  Tensor rows = {};   // [B, block, 2 * e * d] f32, innermost contiguous
  Tensor table = {};  // [R, W] int32; a ring needs none
  bool ring = false;  // block >= e * ratio - 1 + drafts: rows that a step may have to look back to
};

struct CompressArgs {
  // e = 2 with overlap, else 1; d = 512, or 128 for index keys. With a gate a row is values, then
  // gate scores; without, values only.
  Tensor rows;        // [N >= T, (gate ? 2 : 1) * e * d] f32 or bf16: the projections of T tokens
  Tensor positions;   // [T] int32; -1: padding
  Tensor requests;    // [T] int32: row of the state's table, or the ring; needed with a state
  int32_t ratio = 4;  // tokens of an entry: 4 (C4A), 128 (C128A), 1 or 2 (V4.1)
  bool overlap = false;  // C4A: an entry also takes the first d values of the `ratio` rows before
  bool gate = true;      // without one the ratio is 1 and an entry is its token's row
  Tensor bias = {};      // [ratio, e * d] f32, optional: added to the scores by position % ratio
  CompressorState state = {};  // needed when an entry takes more than one row
  Norm norm = {};              // of the pooled d values
  Rope rope = {};              // last or first 64 of d, at the position of the entry's first token
  bool hadamard = false;       // d = 128: after RoPE
  // [T] int64: where the entry that token t closes is stored; negative: nowhere.
  // compressed_slots() fills it.
  Tensor slots = {};
  Cache cache = {};  // kV4Fp8, kV4Bf16 or index keys; optional with latent
  ScaleMode scale = ScaleMode::kDefault;
  // [T, d] bf16, out, optional: entries before RoPE, in the rows of the tokens that close them;
  // other rows stay as they are.
  Tensor latent = {};
  Target target = {};
};

// Token t at position p closes entry w = p / ratio if (p + 1) % ratio = 0:
//   rows j = ratio * w .. p:  u_j = their values (overlap: the last d)
//   overlap, the `ratio` rows before:  u_j = the first d of their values
//   z_j = the scores that belong to u_j, + bias
//   pooled = sum_j softmax_j(z_j) * u_j, per value, fp32, j ascending; rows before 0 do not count
//   latent = bf16(norm(pooled)); entry = hadamard(rope(latent, ratio * w)) -> write() into slots[t]
// so that a call gives the bits of norm(), rotate() and write() on its latents.
//
// Rows are taken from the call where it has them and from the state otherwise, then the call's own
// rows are stored in the state. A request's tokens stand next to each other, in ascending
// positions; any mix of requests and chunk lengths gives the same bytes, as long as a ring is long
// enough. An entry that needs a row that neither has, or a position outside the table of RoPE, is
// not stored. Tokens with positions below 0, requests outside the table and blocks outside [0, B)
// store no row. On the CPU, slots >= pages * page are an Error before anything is written; on CUDA
// they are skipped. Cost: one pass over rows, one write of the state.
void compress(const CompressArgs& args);

}  // namespace winnow
