#include "layer_problems.h"

#include <algorithm>
#include <cmath>

#include "random.h"

namespace winnow::bench {

namespace {

constexpr int64_t kQueryLatent = 1536, kLatent = 512;

}  // namespace

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

NormProblem::NormProblem(const Sizes& s) : placement(s.device) {
  tools::Random random(s.seed);
  for (int i = 0; i < 2; ++i) {
    const int64_t width = i == 0 ? kQueryLatent : kLatent;
    args.rows[i].x = placement.normals(x[i], {s.tokens(), width}, random);
    args.rows[i].out = placement.room(out[i], {s.tokens(), width});
    args.rows[i].norm.weight = placement.normals(weight[i], {width}, random);
  }
  args.target.device = s.device;
}

double NormProblem::bytes() const {
  return bytes_of({args.rows[0].x, args.rows[0].out, args.rows[1].x, args.rows[1].out});
}

RotateProblem::RotateProblem(const Sizes& s) : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  args.x = placement.normals(x, {s.tokens(), s.heads, kLatent}, random);
  args.out = placement.room(out, {s.tokens(), s.heads, kLatent});
  args.positions = turns.position_view;
  args.rope = turns.rope;
  args.rope.inverse = true;
  args.target.device = s.device;
}

double RotateProblem::bytes() const { return bytes_of({args.x, args.out}); }

PrepareQueryProblem::PrepareQueryProblem(const Sizes& s)
    : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  args.q = placement.normals(q, {s.tokens(), s.heads, kLatent}, random);
  args.norm.kind = NormKind::kRms;
  args.out = placement.room(out, {s.tokens(), s.heads, kLatent});
  args.positions = turns.position_view;
  args.rope = turns.rope;
  args.target.device = s.device;
}

double PrepareQueryProblem::bytes() const { return bytes_of({args.q, args.out}); }

IndexQueryProblem::IndexQueryProblem(const Sizes& s) : placement(s.device), turns(placement, s) {
  tools::Random random(s.seed);
  args.q = placement.normals(q, {s.tokens(), s.index_heads, kIndexDim}, random);
  args.weights = placement.normals(weights, {s.tokens(), s.index_heads}, random);
  args.factor = 1 / std::sqrt(static_cast<float>(s.index_heads * kIndexDim));
  args.out = placement.room(out, {s.tokens(), s.index_heads, kIndexDim});
  args.out_weights = placement.room(out_weights, {s.tokens(), s.index_heads});
  args.positions = turns.position_view;
  args.rope = turns.rope;
  args.target.device = s.device;
}

double IndexQueryProblem::bytes() const {
  return bytes_of({args.q, args.weights, args.out, args.out_weights});
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
  int64_t entries = 0;
  for (const int64_t slot : slots.span()) entries += slot >= 0;
  return bytes + static_cast<double>(entries * page_bytes_used(args.cache.format, 1));
}

}  // namespace winnow::bench
