// plan: a batch (query lengths, sequence lengths) -> decode/prefill split, chunks, request ids,
// tile schedule, workspace size and the choice of kernels. Host-side lengths only; never waits for
// a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "winnow/model.h"
#include "winnow/tensor.h"

namespace winnow {

// ---- The arithmetic of planning, each usable alone ------------------------------------------

// Request of each token from query_starts [R + 1]; tokens behind the last request (padding) map to
// 0.
void request_ids(std::span<const int32_t> query_starts, std::span<int32_t> out);

struct BatchSplit {
  int32_t decodes = 0, prefills = 0;  // requests
  int32_t decode_tokens = 0, prefill_tokens = 0;
  int32_t active_decodes = 0;  // decodes with at least one token
  bool operator==(const BatchSplit&) const = default;
};

// Decodes stand first in a batch; a request with more than `threshold` query tokens is a prefill.
// `uniform` asks for decodes of one length: if every length is that of the first request or 0, all
// are decodes and decode_tokens is `tokens` (which may count padding). spec: docs/design.md,
// "Planning".
BatchSplit split_batch(std::span<const int32_t> query_starts, int64_t tokens, int32_t threshold,
                       bool uniform);

struct Chunk {
  int32_t first = 0, last = 0;  // requests [first, last)
  bool operator==(const Chunk&) const = default;
};

// Greedy runs of consecutive requests with sum(seq_lens) <= rows. Throws if one sequence is longer.
std::vector<Chunk> prefill_chunks(std::span<const int32_t> seq_lens, int64_t rows);

// First workspace row of each request: the exclusive prefix sum of seq_lens, from 0 in every chunk.
void workspace_starts(std::span<const int32_t> seq_lens, std::span<const Chunk> chunks,
                      std::span<int32_t> out);

// -1 for tokens of the first `decodes` requests (and padding), else 0, 1, 2... per prefill request.
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
  int32_t ratio = 4;                    // compression; <= 1: no compressed rows
  int32_t window = 128;
  int64_t max_model_len = 0;
  int64_t max_batched_tokens = 0;
};

// Runs of n consecutive requests with n * (max compressed + max gather_len) <= 4 *
// (ceil(max_model_len / ratio) + window + max_batched_tokens), where gather_len = query_len +
// min(prefix, window - 1).
std::vector<V4Chunk> v4_prefill_chunks(const V4ChunkArgs& args);

// The ways of a prefill over an fp8 cache.
enum class Route : uint8_t {
  kDirect,    // attend() from the pages
  kGathered,  // gather(), then attend() from the bf16 rows
  kMha,       // V3.2: gather(), decompress(), attend_mha(): per head, without absorbed queries
};
struct RouteArgs {
  Model model = kV32;
  int32_t heads = 128;
  int32_t tokens = 0, context = 0;  // new ones of the request; all of its sequence
  bool mha = false;                 // kMha may be chosen: the caller holds the projections
  DeviceKind device = DeviceKind::kCuda;
};

// The fastest way, from crossover points measured with a top-k of 2,048 on an H200
// (src/plan/route.cpp; docs/prefill-sm90.md has the times) and, without AMX, on a Zen 4 CPU. On a
// CPU with AMX: kDirect.
Route prefill_route(const RouteArgs& args) noexcept;

// One piece of attention work: positions [begin, end) of token's lists, laid end to end. A token
// cut into several tiles has partial results number `split` = 0, 1, ... merged in that order.
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
  kBalanced,  // even work per worker: the fastest
  kFixed,     // cut at multiples of split_size: a token's result is bitwise the same in any batch
};

// ---- A plan --------------------------------------------------------------------------------

// Which way prefill tokens of an fp8 cache go (a bf16 cache is always kBf16).
enum class Mode : uint8_t {
  kAuto,      // on CUDA from 46 heads on (V4: 32), with PlanOptions::mha or another route than the
              // default: kSeparate, where the route chooses the way of each prefill. Else, and with
              // SplitPolicy::kFixed, kMixed below 32 heads, or kDirect
  kBf16,      // the cache is bf16: every token reads it as it is
  kMixed,     // every token through the paged fp8 kernel, one call
  kSeparate,  // decodes from the pages; prefills through a contiguous bf16 workspace, chunk by
              // chunk
  kDirect,    // prefills straight from the fp8 pages as well; no workspace, no chunks
};

// What a plan chooses a kernel for: the verbs, then gather() and V4's index lists.
enum class Stage : uint8_t { kWrite, kScore, kSelect, kLocate, kAttend, kGather, kLists };
inline constexpr int kStages = 7;

struct PlanOptions {
  Model model = kV32;
  CacheFormat format = CacheFormat::kV32Fp8;  // of the main list; must belong to the model
  int32_t heads = 128;                        // query heads of this rank, 1..128
  int32_t topk = 0;            // width of the first list (V4: the window); 0 means the model's
  int32_t extra_topk = 0;      // V4: width of the second list (compressed states); 0: no such list
  int32_t ratio = 0;           // V4: tokens per compressed state, 0 means 4; V3.2: 1
  int32_t index_heads = 64;    // of the indexer
  int32_t page = 64;           // tokens per page
  int64_t pages = 0;           // in the cache
  int32_t max_requests = 256;  // capacities: refill() accepts up to these
  int32_t max_tokens = 4096;
  int32_t max_context = 0;       // longest sequence; 0 means pages * page
  int32_t decode_threshold = 1;  // 1 + speculative tokens
  bool uniform_decode = false;
  Mode mode = Mode::kAuto;
  // Of kAuto, kBalanced and an fp8 cache: how the way of a prefill is chosen. Another function than
  // this one is asked on every device and for any number of heads. It is asked more than once for a
  // prefill and must give one answer; kMha without `mha` below counts as kGathered. A V3.2 sequence
  // longer than workspace_rows is read from the pages whatever it says; a V4 prefill only where all
  // prefills before it are. Elsewhere it is not asked.
  Route (*route)(const RouteArgs&) noexcept = prefill_route;
  bool mha = false;            // where the route is asked, V3.2: it may be kMha (see Part::mha)
  int64_t workspace_rows = 0;  // of kSeparate; 0 means 5 * max_context, for V4 the bound of
                               // v4_prefill_chunks(max_context, max_tokens)
  SplitPolicy split = SplitPolicy::kBalanced;
  int32_t split_size = 512;  // of kFixed, in list positions
  Target target = {};
};

struct Batch {
  std::span<const int32_t> query_starts;  // [R + 1], from 0, not descending
  std::span<const int32_t> seq_lens;      // [R]: tokens of each sequence, the new ones included; 0
                                          // makes a request padding, its query tokens too
  int64_t tokens = 0;                     // of the batch with padding; 0 means query_starts.back()
};

// One attend() call of a batch: its tokens, the requests they belong to, and what they read.
struct Part {
  int32_t first_token = 0, last_token = 0;      // [first, last)
  int32_t first_request = 0, last_request = 0;  // [first, last)
  bool gathered = false;                        // reads the bf16 workspace: a chunk of kSeparate
  int32_t compressed = 0, rows = 0;             // V4 when gathered: N and M of the chunk
  bool mha = false;  // the gathered rows are for decompress() and attend_mha(), not for attend()
  bool operator==(const Part&) const = default;
};

namespace internal::core {
struct Usable;
}

// Made once for a capacity; refilled for every batch. refill() does not allocate, and spans given
// out keep their addresses. A refill that throws leaves the plan as it was. Not safe to refill
// while a call uses it. On CUDA refill() waits until the stream has run the copy that pipeline()
// starts with; those of a replayed graph are the caller's to wait for.
class Plan {
 public:
  explicit Plan(const PlanOptions& options);
  ~Plan();
  Plan(Plan&&) noexcept;
  Plan& operator=(Plan&&) noexcept;

  void refill(const Batch& batch);

  const PlanOptions& options() const noexcept;  // with defaults resolved
  // Where a call over this plan runs: the plan's device, and there on the stream of the call's own
  // target where that names this device, else on the plan's.
  Device device(const Target& call) const noexcept;
  Mode mode() const noexcept;
  int32_t requests() const noexcept;  // of the current batch
  int32_t tokens() const noexcept;    // padding included
  const BatchSplit& split() const noexcept;
  std::span<const int32_t> query_lens() const noexcept;   // [requests]
  std::span<const int32_t> seq_lens() const noexcept;     // [requests]
  std::span<const int32_t> request_ids() const noexcept;  // [tokens]
  std::span<const int32_t> positions() const noexcept;    // [tokens]; -1 for padding
  // [tokens]: the indexer's keys that a token may see: (position + 1) / ratio; 0 for padding.
  std::span<const int32_t> key_ends() const noexcept;
  // What the spans by request and by token here point into, whole: one block, pinned for a CUDA
  // plan. Copying it to the device carries them all, each at its offset (pipeline() does this).
  std::span<const int32_t> arrays() const noexcept;
  // CUDA: queues that copy, to `to`, on the stream of `device`.
  void upload(void* to, const Device& device) const noexcept;
  // One part with everything; kSeparate: the decodes (if there are any), then every prefill chunk.
  // Of kAuto, runs of prefills that read the pages are parts that are not gathered, the first of
  // them with the decodes. There is always at least one.
  std::span<const Part> parts() const noexcept;
  std::span<const Chunk> chunks() const noexcept;  // kSeparate: of prefill requests, from 0
  // kSeparate: [tokens]; -1 for tokens that read the pages.
  std::span<const int32_t> prefill_requests() const noexcept;
  // kSeparate: [prefills]: each request's first row in its chunk's workspace. Tokens gather_starts
  // + [0, gather_lens) of its sequence go to the rows from gather_rows on. V3.2: the whole
  // sequence, from the first row on; V4: first compressed_lens compressed states, then from row + N
  // on what the windows reach.
  std::span<const int32_t> workspace_starts() const noexcept;
  std::span<const int32_t> compressed_lens() const noexcept;
  std::span<const int32_t> gather_starts() const noexcept;
  std::span<const int32_t> gather_lens() const noexcept;
  std::span<const int32_t> gather_rows() const noexcept;
  // CPU workers of one part; its tiles count tokens from the part's first.
  Schedule schedule(int32_t part = 0) const noexcept;
  size_t workspace_bytes() const noexcept;  // for the capacity, all stages, any part
  size_t gather_bytes() const noexcept;     // kSeparate: the bf16 prefill workspace

  // The kernel that a stage runs for the current batch; before the first refill(), for a batch of
  // the plan's capacity. Parts differ in kAttend alone ("" for one that is `mha`: its calls name
  // their own). kScore and kSelect: for rows of max_context / ratio keys.
  const char* kernel(Stage stage, int32_t part = 0) const noexcept;
  // Why the kernels before it in the stage's table were passed over, for the plan's capacity.
  const std::string& reasons(Stage stage) const noexcept;
  const internal::core::Usable& usable(Stage stage) const noexcept;  // for winnow's own calls

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace winnow
