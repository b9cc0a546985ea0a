// Synthetic inputs of each stage, for the benchmarks and for the program's commands: sizes in,
// filled buffers and the stage's arguments out. Outputs are part of a problem; its arguments point
// into it, so a problem must stay where it is while they are used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "buffer.h"
#include "placement.h"
#include "winnow/attend.h"
#include "winnow/locate.h"
#include "winnow/model.h"
#include "winnow/score.h"
#include "winnow/select.h"
#include "winnow/write.h"

namespace winnow::bench {

inline constexpr int64_t kLatent = 512;  // values of a latent row

struct Sizes {
  Model model = kV32;
  int64_t heads = 16;        // of attention
  int64_t index_heads = 64;  // of the indexer
  int64_t topk = 2048;       // V4: the window
  int64_t extra = 0;         // V4: width of the compressed list
  int64_t batch = 1, s_q = 1;
  int64_t context = 32768;  // tokens of each request
  int32_t page = 64;
  bool shared = false;                    // all requests read the same pages
  bool bf16_cache = false;                // instead of fp8
  ScaleMode scale = ScaleMode::kDefault;  // of fp8 caches
  bool contiguous = false;                // index keys in rows instead of pages
  bool bf16_keys = false;                 // index keys and queries in bf16
  bool shuffled = false;                  // slots in no order
  bool in_order = false;                  // write: page by page, as prefill does
  bool logical = false;                   // logical ids and a block table instead of slots
  bool holes = false;                     // every second slot is -1
  int32_t overlap = 0;  // percent of a token's slots that the token before has too
  Device device = {};
  uint64_t seed = 1;

  int64_t tokens() const { return batch * s_q; }
};

// The pages of `batch` requests in a cache, in random order.
struct Paging {
  Paging(Placement& memory, const Sizes& s, int64_t context);
  int64_t pages = 0, width = 0;     // of the cache; of a table row
  tools::Buffer<int32_t> table;     // [batch, width]
  tools::Buffer<int32_t> requests;  // [tokens]

  Tensor table_view, request_view;
};

// A cache of this format with every slot written from random values. On the host the last two stay
// for the next problem of the same shape and seed: filling one takes longer than timing it.
struct FilledCache {
  FilledCache(Placement& placement, Cache shape, uint64_t seed,
              ScaleMode scale = ScaleMode::kDefault);
  std::shared_ptr<tools::Buffer<std::byte>> memory;
  Cache cache;

 private:
  void fill(Placement& placement, uint64_t seed, ScaleMode scale);
};

struct WriteProblem {
  WriteProblem(const Sizes& s, CacheFormat format);
  Placement placement;
  WriteArgs args;
  tools::Buffer<bf16> kv;
  tools::Buffer<int64_t> slots;
  tools::Buffer<std::byte> memory;
  double bytes() const;  // read and written
};

struct ScoreProblem {
  explicit ScoreProblem(const Sizes& s);
  // Names the kernel and makes the workspace that it needs.
  void use(const char* kernel);
  Placement placement;
  ScoreArgs args;
  Paging paging;
  FilledCache keys;
  tools::Buffer<e4m3> q;
  tools::Buffer<bf16> wide_q, wide_rows;  // with bf16_keys
  tools::Buffer<float> weights, logits;
  tools::Buffer<int32_t> ends;
  tools::Buffer<e4m3> rows;     // of contiguous keys
  tools::Buffer<float> scales;  // of contiguous keys
  tools::Buffer<std::byte> workspace;
  tools::Buffer<int32_t> ids;   // of score_select
  ScoreSelectArgs select_args;  // the same call, ending in ids
  double flops() const;
  double bytes() const;

 private:
  Sizes sizes_;
};

struct SelectProblem {
  explicit SelectProblem(const Sizes& s);
  Placement placement;
  SelectArgs args;
  tools::Buffer<float> logits;
  tools::Buffer<int32_t> ids;
  double bytes() const;
};

struct LocateProblem {
  explicit LocateProblem(const Sizes& s);
  Placement placement;
  LocateArgs args;
  Paging paging;
  tools::Buffer<int32_t> ids, slots, counts;
  double bytes() const;
};

struct AttendProblem {
  explicit AttendProblem(const Sizes& s);
  // Names the kernel and makes the workspace that it needs.
  void use(const char* kernel);
  Placement placement;
  AttendArgs args;
  Paging paging, extra_paging;
  FilledCache cache, extra_cache;
  tools::Buffer<bf16> q, out;
  tools::Buffer<float> lse, max_logit, sink;
  tools::Buffer<int32_t> slots, extra_slots;
  tools::Buffer<std::byte> workspace;
  double flops() const;
  double bytes() const;

 private:
  double attended() const;  // entries of all lists: no more than a context has
  Sizes sizes_;
};

// All tokens of paged caches as contiguous bf16 rows at `rows`: what attention over such rows needs
// first.
struct GatherProblem {
  GatherProblem(const Sizes& s, void* rows);
  Placement placement;
  GatherArgs args;
  Paging paging;
  FilledCache cache;
  tools::Buffer<int32_t> lengths;
};

}  // namespace winnow::bench
