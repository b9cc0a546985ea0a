// What score()'s and score_select()'s kernels see: checked, plain; strides of queries and keys in
// bytes, others in elements.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "core/blocks.h"
#include "core/hd.h"
#include "core/kernel_table.h"
#include "core/range.h"
#include "model/index.h"
#include "winnow/score.h"

namespace winnow {
struct PlanOptions;
}

namespace winnow::internal::score {

inline constexpr int kDim = IndexKeys::kDim;
inline constexpr int kTileKeys = 64;  // of a tile on Hopper

// CUDA: what the host knows of a call. A guess at a token's request and at its keys' pages saves a
// read that waits for another.
struct Guess {
  int64_t together = 0;       // tokens of a request that follow each other; 0: not known yet
  int32_t first_request = 0;  // of token 0
  int32_t step = 1;           // tokens a block takes: they are of request (block >> request_shift)
  int8_t request_shift = -1, page_shift = 0;  // a negative request_shift is no guess
  bool bulk = false;                          // whole tiles can be brought in by bulk copies
};

struct Params {
  bool is_bf16 = false;  // queries and keys: bf16 without scales instead of e4m3
  const uint8_t* q = nullptr;
  int64_t q_token_stride = 0, q_head_stride = 0;
  const float* weights = nullptr;
  int64_t weight_stride = 0;  // between tokens
  int64_t tokens = 0;
  int32_t heads = 0;
  // Paged keys ...
  const std::byte* cache = nullptr;
  int64_t page_stride = 0, pages = 0;  // bytes; pages in the cache
  int32_t page = 1;
  const int32_t* table = nullptr;
  int64_t table_stride = 0, table_rows = 0, table_width = 0;
  const int32_t* requests = nullptr;  // null: contiguous keys
  int64_t request_stride = 0;
  // ... or contiguous ones.
  const uint8_t* rows = nullptr;
  int64_t row_stride = 0;
  const float* scales = nullptr;  // null: bf16
  int64_t scale_stride = 0;
  Ranges ranges;  // limit: columns of a row of logits
  float* logits = nullptr;
  int64_t logit_stride = 0;
  bool clean = false;
  bool from_start = false;  // logit j of token t goes to column j - start instead of j
  bool overlap = false;     // CUDA: may start before the stream's last kernel ends, see TopkParams
  Guess guess;
  Device device;
};

// Consecutive keys that lie side by side in memory: `count` rows of 128 values, `row_stride` bytes
// apart, with their scales (bf16: none). rows is null when they are missing (no such page).
struct Run {
  const uint8_t* rows = nullptr;
  int64_t row_stride = IndexKeys::kRowBytes;
  const float* scales = nullptr;
  int64_t scale_stride = 1;
  int64_t count = 0;
  bool is_bf16 = false;
};

WINNOW_HD inline int32_t request_of(const Params& p, int64_t token) {
  return p.requests ? p.requests[token * p.request_stride] : 0;
}

// The run from row `offset` of a page of the cache on. R: IndexKeys or IndexKeysBf16.
template <class R = IndexKeys>
WINNOW_HD inline Run run_in(const Params& p, int64_t found, int64_t offset, int64_t limit) {
  Run r{.row_stride = R::kRowBytes, .is_bf16 = !R::kQuantized};
  r.count = limit < p.page - offset ? limit : p.page - offset;
  if (found < 0 || found >= p.pages) return r;
  const std::byte* base = p.cache + found * p.page_stride;
  r.rows = reinterpret_cast<const uint8_t*>(base + R::row(offset, p.page));
  if constexpr (R::kQuantized)
    r.scales = reinterpret_cast<const float*>(base + R::scales(offset, p.page));
  return r;
}

// The run that starts at key `first` of a request, at most `limit` keys long. These two decide
// whether a key is there.
template <class R = IndexKeys>
WINNOW_HD inline Run run_of(const Params& p, int32_t request, int64_t first, int64_t limit) {
  Run r{.is_bf16 = !R::kQuantized};
  if (!p.requests) {
    r.rows = p.rows + first * p.row_stride;
    r.row_stride = p.row_stride;
    if constexpr (R::kQuantized) r.scales = p.scales + first * p.scale_stride;
    r.scale_stride = p.scale_stride;
    r.count = limit;
    return r;
  }
  r.count = limit;
  if (request < 0 || request >= p.table_rows) return r;
  const int64_t page = first / p.page, offset = first - page * p.page;
  if (page >= p.table_width) return r;
  return run_in<R>(p, p.table[request * p.table_stride + page], offset, limit);
}

// The same, of the keys that the call has.
inline Run keys_of(const Params& p, int32_t request, int64_t first, int64_t limit) {
  return p.is_bf16 ? run_of<IndexKeysBf16>(p, request, first, limit)
                   : run_of(p, request, first, limit);
}

// score_select(): score.logits is not used.
struct SelectParams {
  Params score;
  int32_t* ids = nullptr;
  int64_t id_stride = 0, width = 0;
  float* values = nullptr;  // may be null
  int64_t value_stride = 0;
  bool relative = false;
  core::Blocks blocks;
  std::span<std::byte> workspace;
};

// Columns of a row of logits that a plan's workspace is made for: keys of its longest context, or,
// where records of sharded caches are gathered, rows of all sequences.
int64_t planned_keys(const PlanOptions& options);

// What the choice of a kernel and the size of its workspace depend on; capacities.
struct Shape {
  int32_t heads = 64;
  int64_t tokens = 1, keys = 0;
  int32_t topk = 2048;
  bool whole_tiles = true;  // CUDA: see whole_tiles() below
  bool is_bf16 = false;     // queries and keys
  bool blocks = false;      // score_select(): of columns
};

// Whether tiles of kTileKeys keys can be brought in by bulk copies: each lies inside a page, on
// 16-byte addresses.
inline bool whole_tiles(const Params& p) {
  const auto bits = [](const void* at) { return reinterpret_cast<uintptr_t>(at); };
  if (!p.requests)
    return p.row_stride == kDim && p.scale_stride == 1 && (bits(p.rows) | bits(p.scales)) % 16 == 0;
  return p.page % kTileKeys == 0 &&
         (bits(p.cache) | static_cast<uintptr_t>(p.page_stride)) % 16 == 0;
}

struct ScoreKernel : Kernel<Shape, Params> {
  size_t (*workspace)(const Shape&);  // bytes that serve score_select() best
  void (*run_select)(const ScoreKernel&, const SelectParams&) noexcept;
};

// score_select()'s table is score()'s.
std::span<const ScoreKernel> kernels();

void reference(const Params& p) noexcept;
void simd(const Params& p) noexcept;
void avx512bf16(const Params& p) noexcept;
void amx(const Params& p) noexcept;

// Tokens [first, first + count) of a call.
inline Params wave_of(const Params& p, int64_t first, int64_t count) {
  Params wave = p;
  wave.tokens = count;
  wave.q += first * wave.q_token_stride;
  wave.weights += first * wave.weight_stride;
  if (wave.requests) wave.requests += first * wave.request_stride;
  if (wave.ranges.starts) wave.ranges.starts += first * wave.ranges.start_stride;
  if (wave.ranges.ends) wave.ranges.ends += first * wave.ranges.end_stride;
  return wave;
}

// CUDA builds. Logits of a few rows live in the workspace between the two kernels of a wave.
// `bulk`: tiles come by bulk copies; `loads`: by ordinary loads, from keys that lie in any way.
void bulk_sm90(const Params& p) noexcept;
void loads_sm90(const Params& p) noexcept;
void select_sm90(const ScoreKernel& kernel, const SelectParams& p) noexcept;
size_t sm90_workspace(const Shape& shape);
// Queries and keys in bf16, by plain sums.
void bf16_sm90(const Params& p) noexcept;

// score_select() on the CPU, with any kernel: rows of logits for a few tokens at a time live in the
// workspace and are selected from before the next tokens come.
size_t waves_workspace(const Shape& shape);
size_t smallest_workspace(int64_t keys);  // one row
int64_t longest_range(const Params& p);   // keys of the token that has most, at least 1
void in_waves(const ScoreKernel& kernel, const SelectParams& p) noexcept;

}  // namespace winnow::internal::score
