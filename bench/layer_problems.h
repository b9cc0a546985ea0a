// Synthetic inputs of the verbs between a layer's projections and attention (problems.h has those
// of the stages).
#pragma once

#include <cstdint>
#include <string>

#include "buffer.h"
#include "placement.h"
#include "problems.h"
#include "winnow/compress.h"
#include "winnow/index_query.h"
#include "winnow/norm.h"
#include "winnow/norm_write.h"
#include "winnow/prepare_queries.h"
#include "winnow/prepare_query.h"
#include "winnow/rotate.h"

namespace winnow::bench {

// Positions of the tokens of `batch` requests, and a table that has them.
struct Turns {
  Turns(Placement& placement, const Sizes& s);
  tools::Buffer<int32_t> positions;
  tools::Buffer<float> table;
  Tensor position_view;
  Rope rope;
};

// Query latents (1,536 in V3.2 and V4 Pro) and KV latents of 512.
struct NormProblem {
  explicit NormProblem(const Sizes& s, int64_t query_latent = 1536);
  Placement placement;
  NormArgs args;
  tools::Buffer<bf16> x[2], out[2];
  tools::Buffer<float> weight[2];
  double bytes() const;
};

// Heads of 512 in place, turned back: what follows attention in V4.
struct RotateProblem {
  explicit RotateProblem(const Sizes& s, bool quantized = false);
  Placement placement;
  Turns turns;
  RotateArgs args;
  tools::Buffer<bf16> x, out;
  tools::Buffer<e4m3> codes;  // instead of out
  tools::Buffer<float> scales;
  double bytes() const;
};

// V4: heads of 512, normalised and turned. V3.2: the last 64 of 192 values, in place.
struct PrepareQueryProblem {
  explicit PrepareQueryProblem(const Sizes& s, bool v32 = false);
  Placement placement;
  Turns turns;
  PrepareQueryArgs args;
  tools::Buffer<bf16> q, out;
  double bytes() const;
};

// V4, or V3.2 with its other pairs and slice.
struct IndexQueryProblem {
  explicit IndexQueryProblem(const Sizes& s, bool v32 = false);
  Placement placement;
  Turns turns;
  IndexQueryArgs args;
  tools::Buffer<bf16> q, weights;
  tools::Buffer<e4m3> out;
  tools::Buffer<float> out_weights;
  double bytes() const;
};

// A projection's rows, normalised, turned and written: V3.2's and V4's records, index keys.
struct WriteProjectionsProblem {
  WriteProjectionsProblem(const Sizes& s, CacheFormat format);
  WriteProblem rows;
  Turns turns;
  WriteArgs args;
  tools::Buffer<float> weight;
  double bytes() const { return rows.bytes(); }
};

// Query latents and KV records; in V3.2 index keys, too.
struct NormWriteProblem {
  NormWriteProblem(const Sizes& s, bool v32);
  NormProblem norm;
  WriteProjectionsProblem records, keys;
  NormWriteArgs args;
  double bytes() const;
};

struct PrepareQueriesProblem {
  PrepareQueriesProblem(const Sizes& s, bool v32);
  PrepareQueryProblem query;
  IndexQueryProblem index;
  PrepareQueriesArgs args;
  double bytes() const { return query.bytes() + index.bytes(); }
};

// The layers of V4 and V4.1 that have a compressor.
struct Compressor {
  std::string name;
  int32_t ratio;
  bool overlap, gate, bias;
  int64_t width;
};
inline const Compressor kCompressors[] = {{"c4a", 4, true, true, true, 512},
                                          {"c4a-index", 4, true, true, true, 128},
                                          {"c128a", 128, false, true, true, 512},
                                          {"c2a", 2, false, true, false, 512},
                                          {"c1a", 1, false, false, false, 512}};

// Rings of a window and the step's tokens; every request's tokens end at `context`.
struct CompressProblem {
  CompressProblem(const Sizes& s, const Compressor& of);
  Placement placement;
  Turns turns;
  CompressArgs args;
  tools::Buffer<float> rows, state, bias, weight;
  tools::Buffer<int32_t> requests;
  tools::Buffer<int64_t> slots;
  tools::Buffer<std::byte> cache;
  double bytes() const;
};

}  // namespace winnow::bench
