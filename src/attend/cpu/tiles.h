// The driver of every CPU attention kernel. A kernel supplies one function, "attend to this range
// of this token's lists"; the driver runs the schedule on the workers, keeps partial results,
// merges them in split order and writes out, lse and max_logit.
//
// What is stored. Tiles are folded in their worker's scratch. A token cut between workers leaves
// parts in the workspace: its first worker folds its own tiles into one part, later workers store
// tile by tile, and a second pass folds the parts. So the order of additions is split 0, 1, 2, ...
// whoever does them: with a fixed split, results are bitwise the same for any batch and any number
// of workers.
#pragma once

#include <cfloat>
#include <cstddef>
#include <cstdint>

#include "attend/kernel.h"

namespace winnow::internal::attend::cpu {

// One head's softmax state over part of a token's lists. 33 cache lines: an odd number, so that
// the rows of a head group do not fall on the same few sets of the L1 cache.
struct alignas(64) Partial {
  float o[kValueDim];  // sum of e^{s - m} V
  float m;             // reference of the exponents: finite, at least kFloor (or NaN)
  float l;             // sum of e^{s - m}; 0: nothing was read, or every logit was -inf
  float max;           // largest logit
  float w;             // the sum again, of the weights as they were rounded before they made o
  float pad[12];
};
static_assert(sizeof(Partial) == 33 * 64);

// A Partial as it waits in the workspace for the merge, which another core will do: what that costs
// is the lines, some 15 ns each, so values are halves where that serves: 17 lines instead of 33.
// A half is within 2^-11 of its value (2^-39 of the row's largest one where it is subnormal), a
// quarter of what O's rounding to bf16 adds.
struct alignas(64) StoredPart {
  float m, l, max, w;  // as in Partial
  float unit;          // power of two that the halves are multiples of; 0: the values are floats
  float pad[11];
  union {
    uint16_t half[kValueDim];
    float o[kValueDim];
  };
};
static_assert(sizeof(StoredPart) == 33 * 64);

// References start here and are clamped to [-FLT_MAX, FLT_MAX], so that no infinity is ever
// subtracted from another: a logit of -inf weighs nothing, one of +inf weighs e^0.
inline constexpr float kFloor = -FLT_MAX;

// Up to kMaxBlock valid records. Those of list 0 come first.
inline constexpr int32_t kMaxBlock = 128;
struct Rows {
  Entry row[kMaxBlock];
  int32_t count = 0;
  int32_t cut = 0;  // rows [0, cut) are of list 0, [cut, count) of list 1
};

// Who takes a tile's result, head by head: a function that outlives the call.
class HeadReceiver {
 public:
  template <class F>
  explicit HeadReceiver(const F& f)
      : context_(&f), call_([](const void* context, int32_t head, const Partial& part) {
          (*static_cast<const F*>(context))(head, part);
        }) {}
  void operator()(int32_t head, const Partial& part) const { call_(context_, head, part); }

 private:
  const void* context_;
  void (*call_)(const void*, int32_t, const Partial&);
};

struct TileJob {
  int64_t token;
  int32_t begin, end;  // positions of the lists, laid end to end
  bool new_query;      // false: this worker's scratch still holds what it made of this token's q
  Partial* parts;      // [heads], for the kernel to work in
  HeadReceiver ready;  // to be called once with each head's result, wherever that is
  const Tile* next =
      nullptr;  // what this worker will likely do next; its keys may be fetched early
};

// Walks the valid entries of a tile in order. Kernels take them block by block.
class Cursor {
 public:
  Cursor(const Params& p, const TileJob& job) noexcept;
  // The next valid entries, at most `limit` <= kMaxBlock of them; the number found, 0 at the end.
  int32_t fill(Rows& rows, int32_t limit) noexcept;

  // What is left of a list, for kernels that look entries up themselves, and the token's request.
  struct Range {
    const int32_t* index = nullptr;  // next column
    const int32_t* end = nullptr;
  };
  Range& left(int list) { return range_[list]; }
  int32_t request() const { return request_; }

 private:
  const Params& p_;
  Range range_[2];
  int32_t request_ = 0;
};

// A kernel, as the driver sees it. tile() trusts its job and allocates nothing; `scratch` has the
// bytes that scratch() asks for, aligned to 64, and belongs to the calling worker.
struct TileKernel {
  size_t (*scratch)(int32_t heads);
  void (*tile)(const Params& p, const TileJob& job, std::byte* scratch) noexcept;
  // Products of 16-bit values: parts may be halves. The CPU must convert to them (F16C, NEON).
  bool rounds = false;
};

void run_tiles(const Params& p, const TileKernel& kernel) noexcept;

// Workspace for calls of this shape whose schedules have at most `tiles` tiles.
size_t tile_workspace(const Shape& shape, int64_t tiles, const TileKernel& kernel);

// acc = acc + part, one head.
void fold(Partial& acc, const Partial& part) noexcept;
void fold(Partial& acc, const StoredPart& part) noexcept;
// To the workspace, as halves if `rounded` (rows that leave (-2^127, 2^127) stay floats), and back.
void store(const Partial& part, bool rounded, StoredPart& to) noexcept;
void load(const StoredPart& part, Partial& to) noexcept;
// Divides, applies the sink, and writes one (token, head).
void finish(const Params& p, int64_t token, int32_t head, const Partial& part) noexcept;

}  // namespace winnow::internal::attend::cpu
