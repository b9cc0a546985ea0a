// Layer::check: the last step against the reference.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "accuracy.h"
#include "layer.h"
#include "score_bar.h"

namespace winnow::cli {

namespace {

// Rows [at, at + count) of a tensor.
Tensor rows(Tensor t, int64_t at, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + at * t.stride[0] * size_of(t.dtype);
  t.shape[0] = count;
  return t;
}

// Heads [at, at + count) of a [T, H, ...] tensor.
Tensor some_heads(Tensor t, int64_t at, int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + at * t.stride[1] * size_of(t.dtype);
  t.shape[1] = count;
  return t;
}

void record(StageCheck& check, const tools::Deviation& d, const Tensor& like) {
  check.worst = std::max(check.worst, d.worst);
  check.compared += d.count;
  if (check.ok && !d.ok) check.ok = false, check.note = d.text(like);
}

}  // namespace

// The reference wrote the same tokens into the shadows, so whole caches must be equal.
void Layer::check_write() {
  StageCheck& c = checks_[kWriteTime];
  const std::pair<const tools::Buffer<std::byte>&, const tools::Buffer<std::byte>&> pairs[] = {
      {memory_, shadow_}, {state_memory_, state_shadow_}, {key_memory_, key_shadow_}};
  for (const auto& [got, want] : pairs) {
    c.compared += static_cast<int64_t>(got.size());
    if (got.size() == 0 || std::memcmp(got.data(), want.data(), got.size()) == 0) continue;
    const auto n = static_cast<int64_t>(got.size());
    record(c, tools::compare(tensor(got.data(), {n}), tensor(want.data(), {n}), tools::kExact),
           tensor(got.data(), {n}));
  }
}

void Layer::check_exact(Timed stage, const Tensor& got, const Tensor& want) {
  record(checks_[stage], tools::compare(got, want, tools::kExact), got);
}

void Layer::check_score(int64_t token) {
  tools::Buffer<float> want(keys_);
  const ScoreArgs all = score_args();
  ScoreArgs a = all;
  a.plan = nullptr;
  a.target.kernel = "reference";
  a.q = rows(a.q, token, 1);
  a.weights = rows(a.weights, token, 1);
  a.requests = rows(a.requests, token, 1);
  a.ends = rows(a.ends, token, 1);
  a.logits = tensor(want.data(), {1, keys_});
  score(a);
  record(checks_[kScoreTime],
         compare_scores(all, token, a.logits, std::max<int64_t>(keys_ / 256, 1)), a.logits);
}

void Layer::check_attend(int64_t token) {
  const int64_t heads = std::min<int64_t>(options_.heads, 8);  // 8 heads cost the reference 50 ms
  const int64_t first = random_.draw(0, options_.heads - heads), d_v = options_.model.d_v;
  tools::Buffer<bf16> out(heads * d_v);
  tools::Buffer<float> lse(heads);
  const AttendArgs all = attend_args();
  AttendArgs a = all;
  a.plan = nullptr;
  a.workspace = {};
  a.target.kernel = "reference";
  a.q = some_heads(rows(a.q, token, 1), first, heads);
  if (a.sink) a.sink = rows(a.sink, first, heads);
  for (KvList& list : a.lists) {
    if (list.indices) list.indices = rows(list.indices, token, 1);
    if (list.lengths) list.lengths = rows(list.lengths, token, 1);
  }
  a.out = tensor(out.data(), {1, heads, d_v});
  a.lse = tensor(lse.data(), {1, heads});
  attend(a);
  const bool decode = token < plan_.split().decode_tokens;
  const Tensor got = some_heads(rows(all.out, token, 1), first, heads);
  const tools::Bar bar = decode ? tools::kDecodeOut : tools::kPrefillOut;
  record(checks_[kAttendTime], tools::compare(got, a.out, bar), got);
  const Tensor got_lse = some_heads(rows(all.lse, token, 1), first, heads);
  record(checks_[kAttendTime],
         tools::compare(got_lse, a.lse, decode ? tools::kDecodeLse : tools::kPrefillLse), got_lse);
}

void Layer::check(const Step& step) {
  check_write();
  const int64_t tokens = step.tokens();
  tools::Buffer<int32_t> want(tokens * options_.topk);
  SelectArgs s = select_args();
  const Tensor ids = s.ids, expected = tensor(want.data(), {tokens, options_.topk});
  s.plan = nullptr;
  s.target.kernel = "reference";
  s.ids = expected;
  select(s);
  check_exact(kSelectTime, ids, expected);
  LocateArgs l = locate_args();
  const Tensor slots = l.slots;
  l.plan = nullptr;
  l.target.kernel = "reference";
  l.slots = expected;
  locate(l);
  check_exact(kLocateTime, slots, expected);
  // The first token is a decode when there is one, the last a prefill.
  const int64_t last = tokens - 1;
  for (const int64_t token : {int64_t{0}, last}) {
    check_score(token);
    check_attend(token);
    if (last == 0) break;
  }
}

}  // namespace winnow::cli
