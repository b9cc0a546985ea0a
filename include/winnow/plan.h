// plan: a batch (query lengths, sequence lengths) -> decode/prefill split, chunks, request ids,
// tile schedule, workspace size and the choice of kernels. Planning reads host-side lengths only
// and never waits for a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "winnow/model.h"
#include "winnow/parallel.h"
#include "winnow/precision.h"
#include "winnow/tensor.h"

namespace winnow {

// ---- The arithmetic of planning, each usable alone ------------------------------------------

// The request of each token, from query_starts [R + 1]. Tokens after the last request are padding
// and map to request 0.
void request_ids(std::span<const int32_t> query_starts, std::span<int32_t> out);

struct BatchSplit {
  int32_t decodes = 0, prefills = 0;  // requests
  int32_t decode_tokens = 0, prefill_tokens = 0;
  int32_t active_decodes = 0;  // decodes with at least one token
  bool operator==(const BatchSplit&) const = default;
};

// Splits a batch into decodes, which come first, and prefills. A request with more than `threshold`
// query tokens is a prefill. `uniform` demands decodes of one length: if every length is that of
// the first request or 0, all requests are decodes. `tokens` may include padding, which counts as
// tokens of the prefills, or of the decodes where there are no prefills. docs/design.md,
// "Planning", has the full rule.
BatchSplit split_batch(std::span<const int32_t> query_starts, int64_t tokens, int32_t threshold,
                       bool uniform);

struct Chunk {
  int32_t first = 0, last = 0;  // requests [first, last)
  bool operator==(const Chunk&) const = default;
};

// Greedy runs of consecutive requests with sum(seq_lens) <= rows. Throws if a single sequence is
// longer than that.
std::vector<Chunk> prefill_chunks(std::span<const int32_t> seq_lens, int64_t rows);

// First workspace row of each request: the exclusive prefix sum of seq_lens, from 0 in every chunk.
void workspace_starts(std::span<const int32_t> seq_lens, std::span<const Chunk> chunks,
                      std::span<int32_t> out);

// The prefill request of each token, counted from 0. Tokens of the first `decodes` requests and
// padding get -1.
void prefill_request_ids(std::span<const int32_t> query_starts, int32_t decodes,
                         std::span<int32_t> out);

struct V4Chunk {
  int32_t first = 0, last = 0;  // requests [first, last)
  int32_t compressed = 0;       // N: compressed rows per request (the largest of the chunk)
  int32_t rows = 0;             // M: N + the largest gather length
  bool operator==(const V4Chunk&) const = default;
};
struct V4ChunkArgs {
  std::span<const int32_t> query_lens;  // [R]
  std::span<const int32_t> seq_lens;    // [R]
  int32_t ratio = 4;                    // compression; 0: no compressed rows
  int32_t window = 128;
  int64_t max_model_len = 0;
  int64_t max_batched_tokens = 0;
};

// Runs of n consecutive requests with
//   n * (max compressed + max gather_len)
//     <= 4 * (ceil(max_model_len / ratio) + window + max_batched_tokens),
// where gather_len = query_len + min(prefix, window - 1).
std::vector<V4Chunk> v4_prefill_chunks(const V4ChunkArgs& args);

// The routes that a prefill over an fp8 cache can take.
enum class Route : uint8_t {
  kDirect,    // attend() from the pages
  kGathered,  // gather(), then attend() from the bf16 rows
  kMha,       // V3.2: gather(), decompress(), attend_mha(): per head, without absorbed queries
};
struct RouteArgs {
  Model model = kV32;
  int32_t heads = 128;
  // New tokens of the request; all tokens of its sequence.
  int32_t tokens = 0, context = 0;
  // Whether kMha may be chosen. The caller must hold the projections for it.
  bool mha = false;
  DeviceKind device = DeviceKind::kCuda;
};

// The fastest route. A CPU with AMX: always kDirect. Elsewhere the choice follows crossover points
// that were measured with a top-k of 2,048, on an H200 and on a Zen 4 CPU (src/plan/route.cpp;
// docs/prefill-sm90.md has the times).
Route prefill_route(const RouteArgs& args) noexcept;

// One piece of attention work: positions [begin, end) of a token's lists, counted through both
// lists. A token that is cut into several tiles has partial results `split` = 0, 1, ..., which are
// merged in that order.
struct Tile {
  int32_t token = 0, begin = 0, end = 0, split = 0;
  bool operator==(const Tile&) const = default;
};

struct Schedule {
  std::span<const Tile> tiles;             // ordered by token, then position
  std::span<const int32_t> worker_starts;  // [workers + 1]: tiles of each worker
  std::span<const int32_t> split_starts;   // [T + 1]: first tile of each token
};

enum class SplitPolicy : uint8_t {
  // Every worker gets an equal share of the work. Fastest.
  kBalanced,
  // Lists are cut at multiples of split_size, so a token's result is bitwise the same in any batch.
  kFixed,
};

// ---- A plan --------------------------------------------------------------------------------

// How the tokens of a batch read the cache. A bf16 cache is always kBf16.
enum class Mode : uint8_t {
  // bf16 cache: kBf16. CUDA with 46 heads or more (V4: 32), or `mha`, or a `route` that you set:
  // kSeparate, with a route chosen for each prefill. Everything else, and always with
  // SplitPolicy::kFixed: kMixed below 32 heads, kDirect from 32 on.
  kAuto,
  // The cache is bf16; every token reads it as it is.
  kBf16,
  // Every token runs through the paged fp8 kernel, in one call.
  kMixed,
  // Decodes read the pages. Prefills read a contiguous bf16 workspace, chunk by chunk.
  kSeparate,
  // Prefills read the fp8 pages too, without workspace or chunks.
  kDirect,
};

// What a plan chooses a kernel for: the verbs, then gather() and V4's index lists.
enum class Stage : uint8_t { kWrite, kScore, kSelect, kLocate, kAttend, kGather, kLists };
inline constexpr int kStages = 7;

struct PlanOptions {
  Model model = kV32;
  // Of the first list's cache; must belong to the model.
  CacheFormat format = CacheFormat::kV32Fp8;
  // Query heads that this rank attends with, 1 to 128. kContext, kQueries: all heads of the group.
  int32_t heads = 128;
  // Width of the first list (V4: the sliding window). 0 means the model's default.
  int32_t topk = 0;
  // V4: width of the second list (compressed states). 0 means that there is none.
  int32_t extra_topk = 0;
  // Tokens per compressed state, 1 of them (V4.1) included. V4: 0 means 4. V3.2: 1.
  int32_t ratio = 0;
  // Heads of the indexer.
  int32_t index_heads = 64;
  // Tokens per page, and pages in the cache. pages may be 0 if max_context is given.
  int32_t page = 64;
  int64_t pages = 0;
  // Capacities: refill() accepts up to these. kQueries: of the whole batch; in options() max_tokens
  // is what a rank's share of that may be.
  int32_t max_requests = 256;
  int32_t max_tokens = 4096;
  // The longest sequence. 0 means pages * page: a single one may fill the cache. Give it where
  // requests are shorter, since workspaces grow with it: that of kSeparate by up to 5.8 KB a token
  // of V3.2 (see workspace_rows).
  int32_t max_context = 0;
  // Query tokens that a decode may have: 1 + speculative tokens.
  int32_t decode_threshold = 1;
  bool uniform_decode = false;
  Mode mode = Mode::kAuto;
  // Chooses the route of each prefill. Used with kAuto, kBalanced and an fp8 cache only. A function
  // of your own is called on every device and for any number of heads. It must always give the same
  // answer for the same arguments, because a plan calls it more than once per prefill. Its answer
  // is overruled in three cases: kMha without `mha` below counts as kGathered; a V3.2 sequence
  // longer than workspace_rows reads the pages; a V4 prefill reads the pages only if all prefills
  // before it do.
  Route (*route)(const RouteArgs&) noexcept = prefill_route;
  // V3.2: whether `route` may answer kMha. Part::mha says what the caller does then.
  bool mha = false;
  // Rows of kSeparate's workspace. 0 means 5 * max_context, or what the cache holds where that is
  // less, but at least max_context; V4: the bound of v4_prefill_chunks() for max_context and
  // max_tokens. kQueries with sharded caches: tokens of the sequences that a batch gathers; 0 means
  // max_context.
  int64_t workspace_rows = 0;
  SplitPolicy split = SplitPolicy::kBalanced;
  // List positions between the cuts of kFixed.
  int32_t split_size = 512;
  Target target = {};
  // How this rank works with others. The constructor and refill() exchange what every rank is about
  // to do, and throw the same Error on all of them where they differ.
  Parallel parallel = {};
  // Of attend(). kFp8 reads fp8 pages alone: kAuto is then kDirect, kMixed below 32 heads.
  Precision precision = Precision::kFull;
};

struct Batch {
  // [R + 1]: starts at 0, never descends.
  std::span<const int32_t> query_starts;
  // [R]: tokens of each sequence, the new ones included. 0 makes the request and its query tokens
  // padding.
  std::span<const int32_t> seq_lens;
  // Tokens of the batch, padding included. 0 means query_starts.back().
  int64_t tokens = 0;
};

// A rank's part of a batch (Spread::kQueries): again a batch, of the same requests. A request's
// tokens are those whose positions the shard has; its sequence ends after the last of them.
struct BatchShare {
  std::vector<int32_t> query_starts;  // [R + 1]
  std::vector<int32_t> seq_lens;      // [R]; 0 for a request without tokens here
  std::vector<int32_t> tokens;        // [T]: number of each token in the whole batch
  std::vector<int32_t> positions;     // [T]
};

// What every rank computes of a batch; the shares of all ranks hold each of its tokens once.
// Padding is nobody's. A request may have fewer tokens than there are ranks, and a share none at
// all.
BatchShare shard_batch(const Batch& batch, const Shard& shard);

// One attend() call of a batch: its tokens, the requests they belong to, and what they read.
struct Part {
  // Half-open ranges [first, last).
  int32_t first_token = 0, last_token = 0;
  int32_t first_request = 0, last_request = 0;
  // Whether the part reads the bf16 workspace: it is a chunk of kSeparate.
  bool gathered = false;
  // V4, when gathered: N and M of the chunk (V4Chunk).
  int32_t compressed = 0, rows = 0;
  // The gathered rows are for decompress() and attend_mha(), not for attend().
  bool mha = false;
  bool operator==(const Part&) const = default;
};

namespace internal::core {
struct Usable;
}

// Made once for a capacity and refilled for every batch. refill() does not allocate, and the spans
// that a plan returns keep their addresses. A refill that throws leaves the plan as it was.
//
// Calls of several threads may share a plan without a communicator, each with a workspace of its
// own. Do not refill a plan while a call uses it. On CUDA, pipeline() first copies the plan's
// arrays to the device, and refill() waits until the stream has run that copy. For the copies of a
// replayed graph the caller must wait. A plan that was moved from throws wherever it is used.
class Plan {
 public:
  explicit Plan(const PlanOptions& options);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  void refill(const Batch& batch);

  const PlanOptions& options() const;  // with defaults resolved
  // Where a call with this plan runs: on the plan's device, on the stream of the call's own target
  // if that names the same device, else on the plan's stream. Throws if the plan was made for the
  // CPU and the target names another device.
  Device device(const Target& call) const;
  Mode mode() const;
  int32_t request_count() const;  // of the current batch
  // Padding included. kQueries: those of this rank; the spans below hold its share.
  int32_t tokens() const;
  // Of the whole batch: tokens() unless kQueries shares them out.
  int32_t batch_tokens() const;
  // kQueries: [W * N], N = the most tokens of a rank: the token of the batch that stands at place i
  // of rank w, at w * N + i; -1 for none. Others: empty.
  std::span<const int32_t> token_order() const;
  const BatchSplit& split() const;
  std::span<const int32_t> query_lens() const;   // [requests]
  std::span<const int32_t> seq_lens() const;     // [requests]
  std::span<const int32_t> request_ids() const;  // [tokens]
  std::span<const int32_t> positions() const;    // [tokens]; -1 for padding
  // [tokens]: the indexer's keys that a token may see: (position + 1) / ratio; 0 for padding.
  // kContext: those of them that this rank holds. kQueries with sharded caches: one past its last
  // row in what gather_prefix() fills; its first is in key_starts(), which others leave empty.
  std::span<const int32_t> key_ends() const;
  std::span<const int32_t> key_starts() const;
  // V4 with compressed states: [tokens]: position of the first token of the state that ends with
  // the token, if one does: position - ratio + 1. Negative: padding, or too early. Others: empty.
  std::span<const int32_t> state_starts() const;
  // kQueries with sharded caches, by request: tokens that the caches hold already, and the first
  // row of its sequence in what gather_prefix() fills; by token_order(): the row of a token. The
  // rows of all requests together: gathered_rows().
  std::span<const int32_t> prefix_lens() const;
  std::span<const int32_t> row_starts() const;
  std::span<const int32_t> token_rows() const;
  int64_t gathered_rows() const;
  // The block of memory that holds all spans by request and by token; pinned for a CUDA plan. One
  // copy of it brings them all to the device, each at its offset (pipeline() does this).
  std::span<const int32_t> arrays() const;
  // CUDA: queues that copy to `to` on the stream of `device`.
  void upload(void* to, const Device& device) const;
  // The attend() calls of the batch, at least one. kSeparate: the decodes (if there are any), then
  // every prefill chunk; with kAuto, runs of prefills that read the pages are parts too, the first
  // of them together with the decodes. Other modes: one part with all tokens.
  std::span<const Part> parts() const;
  std::span<const Chunk> chunks() const;  // kSeparate: of prefill requests, from 0
  // kSeparate: [tokens]; -1 for tokens that read the pages.
  std::span<const int32_t> prefill_requests() const;
  // kSeparate: [prefills]: each request's first row in its chunk's workspace. gather_lens tokens of
  // its sequence, from gather_starts on, go to the rows from gather_rows on. V3.2: the whole
  // sequence, from the first row on. V4: compressed_lens compressed states from the first row on,
  // then, from row first + N on, the tokens that the windows of its queries reach.
  std::span<const int32_t> workspace_starts() const;
  std::span<const int32_t> compressed_lens() const;
  std::span<const int32_t> gather_starts() const;
  std::span<const int32_t> gather_lens() const;
  std::span<const int32_t> gather_rows() const;
  // The tiles of one part for the CPU's workers. They count tokens from the part's first.
  Schedule schedule(int32_t part = 0) const;
  size_t workspace_bytes() const;  // for the capacity, all stages, any part
  size_t gather_bytes() const;     // kSeparate: the bf16 prefill workspace

  // The kernel that a stage runs for the current batch; before the first refill(), for a batch of
  // the plan's capacity. Parts differ in kAttend alone ("" for one that is `mha`: its calls name
  // their own). kScore and kSelect: for rows of max_context / ratio keys, in e4m3.
  const char* kernel(Stage stage, int32_t part = 0) const;
  // Why the kernels before it in the stage's table were passed over, for the plan's capacity.
  const std::string& reasons(Stage stage) const;
  const internal::core::Usable& usable(Stage stage) const;  // for winnow's own calls

 private:
  struct State;
  State& state() const;  // throws when it was moved away
  std::unique_ptr<State> state_;
};

}  // namespace winnow
