// pipeline: one layer's batch through all six stages.
#pragma once

#include <cstddef>
#include <span>

#include "winnow/attend.h"
#include "winnow/compress.h"
#include "winnow/index_query.h"
#include "winnow/lists.h"
#include "winnow/locate.h"
#include "winnow/plan.h"
#include "winnow/prepare_query.h"
#include "winnow/score.h"
#include "winnow/select.h"
#include "winnow/write.h"

namespace winnow {

// The indexer of one layer: its cache of keys and this batch's inputs.
struct Indexer {
  Tensor k;      // [>= S, 128] bf16: keys of the new tokens (V4: of the new compressed states)
  Tensor slots;  // [S] int64: where they go; V3.2: S = T
  // kIndexKeys; with q in bf16 kIndexKeysBf16. V4 without k and slots: another layer's, only read.
  Cache keys;
  Tensor block_table;  // [>= R, W] int32
  Tensor q;            // [T, H_I, 128] e4m3 or bf16
  Tensor weights;      // [T, H_I] f32
};

// A compressor of V4, with the members of CompressArgs. Entries of as many tokens as the plan's
// ratio says go where compressed_slots() finds a place for them.
struct Compressor {
  Tensor rows = {};  // [>= T, ...] f32 or bf16: projections of this batch
  bool overlap = false, gate = true;
  Tensor bias = {};
  CompressorState state = {};
  Norm norm = {};
  bool hadamard = false;
  ScaleMode scale = ScaleMode::kDefault;
};

// Index queries before RoPE, with the members of IndexQueryArgs.
struct RawIndexQuery {
  Tensor q = {};        // [T, H_I, 128] bf16
  Tensor weights = {};  // [T, H_I] f32 or bf16
  bool hadamard = false;
  ScaleMode scale = ScaleMode::kDefault;
  float factor = 1.0f;
};

// V4: the steps between a layer's projections and the stages. They run if rope has a table; the
// other inputs of the call are then outputs of projections.
struct LayerSteps {
  Rope rope = {};  // of the layer: turns kv, q, entries and index queries, and out back
  Norm kv_norm = {.kind = NormKind::kNone};
  Norm q_norm = {.kind = NormKind::kNone};  // of each head; q is prepared in place
  ScaleMode scale = ScaleMode::kDefault;    // of kv's records
  Compressor states = {};                   // makes compressed_kv and compressed_slots
  // Makes indexer.k and indexer.slots. Without rows, but with indexer.k: k holds a projection of
  // each token's latent (V4.1), of which norm, hadamard and scale make its state's index key.
  Compressor index = {};
  RawIndexQuery index_query = {};  // fills indexer.q and indexer.weights, outputs then
};

struct PipelineArgs {
  const Plan* plan = nullptr;  // refilled for this batch; made without `mha`
  // write: the new tokens (V4: into the sliding-window cache), and V4's new compressed states.
  // kQueries: kv, q and out have this rank's tokens; slots, the indexer's too, those of the whole
  // batch (plan->batch_tokens()), in its order.
  Tensor kv;     // [>= T, d] bf16
  Tensor slots;  // [T] int64
  Cache cache;
  Tensor block_table;            // [>= R, W] int32
  Tensor compressed_kv = {};     // V4: [>= S, d] bf16; S may be 0
  Tensor compressed_slots = {};  // V4: [S] int64
  Cache compressed = {};         // V4; without the two above: written before, and only read here
  Tensor compressed_table = {};  // V4: [>= R, W2] int32
  Indexer indexer = {};          // V3.2, and V4 unless every compressed state is attended to
  Tensor q;                      // [T, H, d_qk] bf16
  float scale = kNotGiven;       // of the logits; must be given, attend.h says how large
  // Spread::kContext over W ranks: H / W heads from here on, those of this rank.
  Tensor sink = {};  // [H] f32, optional
  Tensor out;        // [T, H, d_v] bf16
  // [T, H] f32, optional. Of a row without keys, padding for example: +inf, as attend() gives it;
  // over Spread::kContext -inf, as combine() does.
  Tensor lse = {};
  std::span<std::byte> workspace;  // pipeline_workspace_bytes(plan)
  Target target = {};              // the stream, if not the plan's
  LayerSteps steps = {};
  // kQueries with sharded caches: what gather_prefix() has filled for this layer. Empty: the call
  // gathers it first, into its workspace.
  std::span<std::byte> prefix = {};
  // What the indexer chooses: numbers of tokens (V4: of compressed states) in their sequence, as
  // select() gives them. [T, K] int32, optional, K = options.topk (V4: extra_topk). With indexer.q
  // an output, which later layers may read; without, an input: the choice of an earlier layer.
  Tensor ids = {};
  SelectBlocks blocks = {};  // of the indexer's selection (V4.1)
};

// write -> score -> select -> locate -> attend over a plan of this batch.
// V3.2 attends to the indexer's top-k of all tokens. V4 attends to the sliding window (options.topk
// tokens) and to options.extra_topk compressed states: the indexer's top-k, or all of them when
// neither indexer.q nor ids are given (they must fit).
// With steps the call begins at the projections of a V4 layer of any kind: prepare_query() ->
// write() with a prologue -> compress() of states and index keys -> index_query(), the stages, then
// rotate() of out, bit for bit. Tokens of all requests, chunks of prefills and decodes alike, go
// through it together; positions outside the table are left out. A V4.1 layer that stores states
// calls compress() first, for their latents, projects these to `indexer.k`, and leaves steps.states
// empty. Layers that read its states and keys, or its ids, name its caches and lists and give
// nothing to write there. ids and blocks are for one rank. The result does not depend on the
// plan's mode, up to rounding. Throws before anything is written. Allocates nothing, and keeps the
// logits of a few tokens at a time only. On CUDA it first copies the plan's arrays to the workspace
// on the stream (plan.h says what refill() waits for).
void pipeline(const PipelineArgs& args);

// For the plan's capacity: the stages' workspace, index lists, and in kSeparate the gathered
// chunk.
size_t pipeline_workspace_bytes(const Plan& plan);

}  // namespace winnow
