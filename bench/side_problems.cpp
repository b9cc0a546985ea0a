#include "side_problems.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/arithmetic.h"
#include "random.h"

namespace winnow::bench {

namespace {

constexpr int64_t kKey = 192, kValue = 128;
// V4: compressed states stand for this many tokens, in C128A layers for that many; a window has 128
// tokens; 512 compressed states are chosen.
constexpr int32_t kRatio = 4, kHeavyRatio = 128, kWindow = 128;
constexpr int64_t kStates = 512;

}  // namespace

MhaProblem::MhaProblem(const Sizes& s)
    : placement(s.device), ids(s.tokens() * s.topk), starts(s.tokens()), lengths(s.tokens()) {
  tools::Random random(s.seed);
  const int64_t tokens = s.tokens(), context = std::max(s.context, s.s_q);
  const int64_t rows = s.batch * context;
  double keys = 0;
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t seen = context - s.s_q + t % s.s_q + 1;
    starts[t] = static_cast<int32_t>(t / s.s_q * context);
    lengths[t] = static_cast<int32_t>(seen);
    if (s.topk > 0) random.choose(ids.span(t * s.topk, s.topk), seen);
    keys += static_cast<double>(s.topk > 0 ? std::min(s.topk, seen) : seen);
  }
  args.q = placement.normals(q, {tokens, s.heads, kKey}, random);
  args.k = placement.normals(k, {rows, s.heads, kKey}, random);
  args.v = placement.normals(v, {rows, s.heads, kValue}, random);
  if (s.topk > 0) args.ids = placement.copied(ids, {tokens, s.topk});
  if (s.batch > 1) args.starts = placement.copied(starts, {tokens});
  args.lengths = placement.copied(lengths, {tokens});
  args.scale = 1 / std::sqrt(static_cast<float>(kKey));
  args.out = placement.room(out, {tokens, s.heads, kValue});
  args.target.device = s.device;
  flops_ = 2.0 * static_cast<double>(s.heads * (kKey + kValue)) * keys;
}

double MhaProblem::bytes() const { return bytes_of({args.q, args.k, args.v, args.out}); }

MergeProblem::MergeProblem(const Sizes& s, int64_t parts) : placement(s.device) {
  tools::Random random(s.seed);
  args.partial_out = placement.normals(partial_out, {parts, s.tokens(), s.heads, kLatent}, random);
  args.partial_lse = placement.normals(partial_lse, {parts, s.tokens(), s.heads}, random);
  args.out = placement.room(out, {s.tokens(), s.heads, kLatent});
  args.lse = placement.room(lse, {s.tokens(), s.heads});
  args.target.device = s.device;
}

double MergeProblem::bytes() const {
  return bytes_of({args.partial_out, args.partial_lse, args.out, args.lse});
}

MaskProblem::MaskProblem(const Sizes& s) : placement(s.device), ids(s.tokens() * s.topk) {
  tools::Random random(s.seed);
  for (int32_t& id : ids) id = static_cast<int32_t>(random.draw(0, s.context - 1));
  args.ids = placement.copied(ids, {s.tokens(), s.topk});
  args.mask = placement.room(mask, {s.tokens(), ceil_div(s.context, 8)});
  args.target.device = s.device;
}

double MaskProblem::bytes() const { return bytes_of({args.ids, args.mask}); }

AbsorbProblem::AbsorbProblem(const Sizes& s) : placement(s.device) {
  tools::Random random(s.seed);
  Tensor w = placement.normals(weight, {s.heads, kLatent, kValue}, random, 0.05f);
  std::swap(w.shape[0], w.shape[1]);
  std::swap(w.stride[0], w.stride[1]);
  query.q_nope = placement.normals(queries, {s.tokens(), s.heads, kValue}, random);
  query.w_uk = w;
  query.out = placement.room(absorbed, {s.tokens(), s.heads, kLatent});
  query.target.device = s.device;
  output.attn = placement.normals(latents, {s.tokens(), s.heads, kLatent}, random);
  output.w_uv = w;
  output.out = placement.room(projected, {s.tokens(), s.heads, kValue});
  output.target.device = s.device;
}

double AbsorbProblem::flops() const {
  return 2.0 * static_cast<double>(query.q_nope.size() * kLatent);
}

double AbsorbProblem::bytes() const { return bytes_of({query.w_uk, query.q_nope, query.out}); }

ListsProblem::ListsProblem(const Sizes& s, std::string_view kind)
    : placement(s.device),
      paging(placement, s, s.context),
      positions(s.tokens()),
      seq_lens(s.batch),
      gather_lens(s.batch),
      kind_(kind) {
  tools::Random random(s.seed);
  const int64_t tokens = s.tokens(), context = std::max(s.context, s.s_q);
  for (int64_t t = 0; t < tokens; ++t)
    positions[t] = static_cast<int32_t>(context - s.s_q + t % s.s_q);
  const Tensor position_view = placement.copied(positions, {tokens});
  const Tensor length_view = placement.room(lengths, {tokens});
  const Target target{.device = s.device};
  if (kind == "slots") {
    out = placement.room(slots, {tokens});
    slots_args_ = {.positions = position_view,
                   .requests = paging.request_view,
                   .block_table = paging.table_view,
                   .ratio = kRatio,
                   .page = s.page,
                   .pages = paging.pages,
                   .slots = out,
                   .target = target};
  } else if (kind == "c128a") {
    const int32_t width = c128a_width(static_cast<int32_t>(context) - 1, kHeavyRatio);
    out = placement.room(lists, {tokens, width});
    c128a_args_ = {.positions = position_view,
                   .requests = paging.request_view,
                   .block_table = paging.table_view,
                   .ratio = kHeavyRatio,
                   .page = s.page,
                   .pages = paging.pages,
                   .decode_tokens = tokens,
                   .lists = out,
                   .lengths = length_view,
                   .target = target};
  } else if (kind == "window") {
    out = placement.room(lists, {tokens, kWindow});
    window_args_ = {.positions = position_view,
                    .requests = paging.request_view,
                    .block_table = paging.table_view,
                    .window = kWindow,
                    .page = s.page,
                    .pages = paging.pages,
                    .lists = out,
                    .lengths = length_view,
                    .target = target};
  } else {
    const auto compressed = static_cast<int32_t>(ceil_div(context, kRatio));
    const auto gathered = static_cast<int32_t>(std::min(context, s.s_q + kWindow - 1));
    for (int64_t r = 0; r < s.batch; ++r) {
      seq_lens[r] = static_cast<int32_t>(context);
      gather_lens[r] = gathered;
    }
    topk = tools::Buffer<int32_t>(tokens * kStates);
    for (int64_t t = 0; t < tokens; ++t)
      random.choose(topk.span(t * kStates, kStates), (positions[t] + 1) / kRatio);
    out = placement.room(lists, {tokens, round_up(kStates + kWindow, 128)});
    combined_args_ = {.topk = placement.copied(topk, {tokens, kStates}),
                      .positions = position_view,
                      .requests = paging.request_view,
                      .seq_lens = placement.copied(seq_lens, {s.batch}),
                      .gather_lens = placement.copied(gather_lens, {s.batch}),
                      .ratio = kRatio,
                      .window = kWindow,
                      .compressed = compressed,
                      .rows = compressed + gathered,
                      .lists = out,
                      .lengths = length_view,
                      .target = target};
  }
}

void ListsProblem::run(const char* kernel) {
  const auto with = [&](auto args) {
    args.target.kernel = kernel;
    return args;
  };
  if (kind_ == "slots") compressed_slots(with(slots_args_));
  else if (kind_ == "c128a") c128a_lists(with(c128a_args_));
  else if (kind_ == "window") window_lists(with(window_args_));
  else combined_lists(with(combined_args_));
}

double ListsProblem::bytes() const { return bytes_of({out}); }

}  // namespace winnow::bench
