// score: indexer queries, weights, cached index keys -> logits.
#pragma once

#include <cstddef>
#include <span>

#include "winnow/select.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

struct ScoreArgs {
  const Plan* plan = nullptr;
  Tensor q;        // [T, H_I, 128] e4m3, heads 1..128; or bf16, with keys in bf16
  Tensor weights;  // [T, H_I] f32; already holds q's scale and the softmax factors
  // Paged keys: a cache of index keys (with q in bf16: kIndexKeysBf16), with the pages of each
  // request ...
  Cache keys = {};
  Tensor block_table = {};  // [R, W] int32
  Tensor requests = {};     // [T] int32: request of each token
  // ... or contiguous keys:
  Tensor key_rows = {};    // [N, 128], of q's type
  Tensor key_scales = {};  // [N] f32; none in bf16
  Tensor starts = {};      // [T] int32: first valid key of a token, optional (0)
  Tensor ends;             // [T] int32: one past its last valid key
  Tensor logits = {};      // [T, N] f32; N bounds the keys of a row
  bool clean = false;      // fill entries outside [start, end) with -inf; else they are left alone
  Target target = {};
  // With a plan: T is at most its tokens instead of all of them (a rank's share of the rows).
  bool some_tokens = false;
};

// logits[t, j] = s_k[j] * sum_h weights[t, h] * max(0, q[t, h] . k[j]) for start_t <= j < end_t, in
// fp32; s_k is 1 in bf16. max(0, NaN) is 0, as fmax defines it. Ranges are clamped to [0, N). A
// logit does not depend on the other tokens and keys of the call. A paged key whose page id is
// missing or outside the cache gives -inf, and so does every key of a token whose request is
// outside the table. Error of the CPU kernels, with u = 2^-24:
//   |s_k| * sum_h |w_h| * (128 u * sum_i |q_hi k_i| + (H_I + 2) u * max(0, q_h . k))
// Hopper's tensor core sums fp8 products with 14 bits, which adds
//   |s_k| * sum_h |w_h| * 132 * 2^-13 * (the largest product or partial sum of the head)
// Its kernel for bf16 keeps the CPU's bound.
// Cost: 2 * 128 * H_I FLOP and 132 B (bf16: 256 B) per key. Keys are read once per block of tokens.
void score(const ScoreArgs& args);

struct ScoreSelectArgs {
  ScoreArgs score;           // logits stays empty
  Tensor ids;                // [T, K] int32, as select() gives them
  Tensor values = {};        // [T, K] f32, as in SelectArgs
  bool relative = false;     // as in SelectArgs
  SelectBlocks blocks = {};  // as in SelectArgs; every key of a token's range is scored still
  // plan->workspace_bytes(), without a plan score_select_workspace_bytes(). On the CPU a row of
  // floats for the longest range is enough, and a call without a plan may leave it empty and
  // allocates its own.
  std::span<std::byte> workspace = {};
};

// score() and select() in one call, without the [T, N] matrix. The ids are bit for bit those of the
// two calls with the same kernel. N is the number of key_rows, or the block table's width times the
// page. Memory: the logits of some tokens at a time, up to 8 MB on the CPU and 256 MB on CUDA, or
// one row if that is longer.
void score_select(const ScoreSelectArgs& args);

// The workspace with which a score_select() call without a plan is fastest.
size_t score_select_workspace_bytes(const ScoreSelectArgs& args);

}  // namespace winnow
