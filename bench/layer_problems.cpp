#include "layer_problems.h"

#include <algorithm>
#include <cmath>

#include "random.h"

namespace winnow::bench {

Turns::Turns(Placement& placement, const Sizes& s)
    : positions(s.tokens()), table(std::max(s.context, s.s_q) * 64) {
  const int64_t count = std::max(s.context, s.s_q);
  for (int64_t t = 0; t < s.tokens(); ++t)
    positions[t] = static_cast<int32_t>(count - s.s_q + t % s.s_q);
  rope_table({.theta = 160000,
              .factor = 16,
              .original = 65536,
              .table = tensor(table.data(), {count, 2, 32})});
  position_view = placement.copied(positions, {s.tokens()});
  rope.table = placement.copied(table, {count, 2, 32});
}

NormProblem::NormProblem(const Sizes& s, int64_t query_latent) : placement(s.device) {
  tools::Random random(s.seed);
  for (int i = 0; i < 2; ++i) {
    const int64_t width = i == 0 ? query_latent : kLatent;
    args.rows[i].x = placement.normals(x[i], {s.tokens(), width}, random);
    args.rows[i].out = placement.room(out[i], {s.tokens(), width});
    args.rows[i].norm.weight = placement.normals(weight[i], {width}, random);
  }
  args.target.device = s.device;
}

double NormProblem::bytes() const {
  return bytes_of({args.rows[0].x, args.rows[0].out, args.rows[1].x, args.rows[1].out});
}

RotateProblem::RotateProblem(const Sizes& s, bool quantized)
    : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  args.x = placement.normals(x, {s.tokens(), s.heads, kLatent}, random);
  if (quantized) {
    args.out = placement.room(codes, {s.tokens(), s.heads, kLatent});
    args.scales = placement.room(scales, {s.tokens(), s.heads, kLatent / 128});
  } else {
    args.out = placement.room(out, {s.tokens(), s.heads, kLatent});
  }
  args.positions = turns.position_view;
  args.rope = turns.rope;
  args.rope.inverse = true;
  args.target.device = s.device;
}

double RotateProblem::bytes() const { return bytes_of({args.x, args.out, args.scales}); }

PrepareQueryProblem::PrepareQueryProblem(const Sizes& s, bool v32)
    : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  if (v32) {
    constexpr int64_t kHead = 192, kNope = kHead - kRopeDim;
    args.q = placement.normals(q, {s.tokens(), s.heads, kHead}, random);
    args.q.data = static_cast<bf16*>(args.q.data) + kNope;
    args.q.shape[2] = kRopeDim;
    args.out = args.q;
  } else {
    args.q = placement.normals(q, {s.tokens(), s.heads, kLatent}, random);
    args.norm.kind = NormKind::kRms;
    args.out = placement.room(out, {s.tokens(), s.heads, kLatent});
  }
  args.positions = turns.position_view;
  args.rope = turns.rope;
  args.target.device = s.device;
}

double PrepareQueryProblem::bytes() const { return bytes_of({args.q, args.out}); }

IndexQueryProblem::IndexQueryProblem(const Sizes& s, bool v32)
    : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  args.q = placement.normals(q, {s.tokens(), s.index_heads, kIndexDim}, random);
  args.weights = placement.normals(weights, {s.tokens(), s.index_heads}, random);
  args.factor = 1 / std::sqrt(static_cast<float>(s.index_heads * kIndexDim));
  args.out = placement.room(out, {s.tokens(), s.index_heads, kIndexDim});
  args.out_weights = placement.room(out_weights, {s.tokens(), s.index_heads});
  args.positions = turns.position_view;
  args.rope = turns.rope;
  if (v32) {
    args.rope.pairs = RopePairs::kHalf;
    args.rope.slice = RopeSlice::kFirst;
  }
  args.target.device = s.device;
}

double IndexQueryProblem::bytes() const {
  return bytes_of({args.q, args.weights, args.out, args.out_weights});
}

WriteProjectionsProblem::WriteProjectionsProblem(const Sizes& s, CacheFormat format)
    : rows(s, format), turns(rows.placement, s), args(rows.args) {
  tools::Random random(s.seed);
  const bool keys = format == CacheFormat::kIndexKeys;
  const int64_t width = keys ? kIndexDim : kLatent;
  Prologue& prologue = args.prologue;
  prologue.norm.kind = keys ? NormKind::kLayer : NormKind::kRms;
  prologue.norm.weight = rows.placement.normals(weight, {width}, random);
  prologue.rope = turns.rope;
  prologue.positions = turns.position_view;
  if (keys) {  // V3.2's
    prologue.rope.pairs = RopePairs::kHalf;
    prologue.rope.slice = RopeSlice::kFirst;
  }
}

NormWriteProblem::NormWriteProblem(const Sizes& s, bool v32)
    : norm(s),
      records(s, v32 ? CacheFormat::kV32Fp8 : CacheFormat::kV4Fp8),
      keys(s, CacheFormat::kIndexKeys) {
  args.norm.rows[0] = norm.args.rows[0];
  args.write[0] = records.args;
  if (v32) args.write[1] = keys.args;
  args.target.device = s.device;
}

double NormWriteProblem::bytes() const {
  const double normed = bytes_of({args.norm.rows[0].x, args.norm.rows[0].out});
  return normed + records.bytes() + (args.write[1].cache ? keys.bytes() : 0);
}

PrepareQueriesProblem::PrepareQueriesProblem(const Sizes& s, bool v32)
    : query(s, v32), index(s, v32) {
  args.query = query.args;
  args.index = index.args;
  args.target.device = s.device;
}

CompressProblem::CompressProblem(const Sizes& s, const Compressor& of)
    : placement(s.device), turns(placement, s), requests(s.tokens()), slots(s.tokens()) {
  tools::Random random(s.seed);
  const int64_t values = (of.overlap ? 2 : 1) * of.width;
  const int64_t ring = (of.overlap ? 2 : 1) * of.ratio + s.s_q;
  args.rows = placement.normals(rows, {s.tokens(), (of.gate ? 2 : 1) * values}, random);
  args.ratio = of.ratio;
  args.overlap = of.overlap;
  args.gate = of.gate;
  if (of.bias) args.bias = placement.normals(bias, {of.ratio, values}, random);
  if (of.gate) {
    args.state.rows = placement.normals(state, {s.batch, ring, 2 * values}, random);
    args.state.ring = true;
  }
  args.norm.weight = placement.normals(weight, {of.width}, random);
  args.rope = turns.rope;
  args.positions = turns.position_view;
  int64_t entries = 0;
  for (int64_t t = 0; t < s.tokens(); ++t) {
    requests[t] = static_cast<int32_t>(t / s.s_q);
    slots[t] = (turns.positions[t] + 1) % of.ratio == 0 ? entries++ : -1;
  }
  args.requests = placement.copied(requests, {s.tokens()});
  args.slots = placement.copied(slots, {s.tokens()});
  args.cache.format = of.width == kIndexDim ? CacheFormat::kIndexKeys : CacheFormat::kV4Fp8;
  args.cache.page = s.page;
  args.cache.pages = entries / s.page + 1;
  const int64_t bytes = args.cache.pages * page_bytes(args.cache.format, s.page);
  args.cache.data = placement.room(cache, {bytes}).data;
  args.target.device = s.device;
}

double CompressProblem::bytes() const {
  // Rows are read and, with a state, written; of the cache what the entries take.
  double bytes = bytes_of({args.rows});
  if (args.state.rows) bytes += static_cast<double>(args.rows.size()) * sizeof(float);
  // An entry also reads those rows of its window that the call does not have.
  const int64_t window = (args.overlap ? 2 : 1) * int64_t{args.ratio};
  const int64_t width = record_dim(args.cache.format);
  int64_t entries = 0, looked_up = 0, first = 0;
  for (int64_t t = 0; t < std::ssize(slots.span()); ++t) {
    if (requests[t] != requests[first]) first = t;
    if (slots[t] < 0) continue;
    ++entries;
    looked_up += std::max<int64_t>(0, window - (t - first + 1));
  }
  if (args.state.rows) bytes += static_cast<double>(looked_up * 2 * width) * sizeof(float);
  // ... and, of a chunk, a row of the table of its own.
  if (args.positions.shape[0] > 1 && requests[0] == requests[1])
    bytes += static_cast<double>(entries * kRopeDim) * sizeof(float);
  return bytes + static_cast<double>(entries * page_bytes_used(args.cache.format, 1));
}

}  // namespace winnow::bench
