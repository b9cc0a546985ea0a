// The second half of a layer: what its queries see, attention, the output projections; and what a
// comparison reads.
#include <algorithm>

#include "core/kernel_table.h"
#include "whole/layer.h"

namespace winnow::cli::whole {

namespace {

// The workspace of a call, grown where it needs more than those before it.
std::span<std::byte> grown(Array<std::byte>& memory, const Queue& queue, size_t bytes) {
  if (memory.size() < static_cast<int64_t>(bytes))
    memory = Array<std::byte>(queue, static_cast<int64_t>(bytes));
  return {memory.data(), bytes};
}

}  // namespace

ScoreArgs Layer::score_args() {
  const Spec& s = spec_;
  const Pages& keys = (s.own_keys ? this : entry_owner_)->keys_.pages;
  const Tensor q =
      capacity_.bf16_caches
          ? tensor(reinterpret_cast<bf16*>(index_ready_.data()), {tokens_, s.index_heads, 128})
          : tensor(reinterpret_cast<e4m3*>(index_ready_.data()), {tokens_, s.index_heads, 128});
  return {.q = q,
          .weights = index_weights_.view({tokens_, s.index_heads}),
          .keys = keys.cache,
          .block_table = keys.table_view(),
          .requests = requests(),
          .ends = ends_.view({tokens_}),
          .target = target()};
}

SelectBlocks Layer::blocks(int64_t keys) {
  SelectBlocks b{.size = kBlock};
  const int64_t count = std::min(block_finder_->choice_.block_count, (keys + kBlock - 1) / kBlock);
  if (count == 0) return b;
  if (spec_.finds_blocks) b.best = choice_.blocks.view({tokens_, count});
  if (spec_.within_blocks) b.within = block_finder_->choice_.blocks.view({tokens_, count});
  return b;
}

void Layer::choose(int64_t context) {
  const int64_t keys = context / std::max(spec_.ratio, 1);
  choice_.width = std::max<int64_t>(1, std::min(spec_.topk, keys));
  ScoreSelectArgs a{.score = score_args(),
                    .ids = choice_.ids.view({tokens_, choice_.width}),
                    .blocks = blocks(keys)};
  a.workspace = grown(workspace_, queue_, score_select_workspace_bytes(a));
  double scored = 0;
  for (int64_t t = 0; t < tokens_; ++t) scored += ends_.host()[t];
  const double record = capacity_.bf16_caches ? 256 : 132;
  timed(kChoose, scored * record, 256.0 * scored * static_cast<double>(spec_.index_heads),
        [&] { score_select(a); });
  kernels_[kChoose] = detail::last_chosen();
  choice_width_ = choice_.width;
}

// C128A: every entry.
void Layer::list_all(int64_t context) {
  choice_.width = c128a_width(static_cast<int32_t>(context - 1), spec_.ratio);
  choice_width_ = 0;
  if (choice_.width == 0) return;
  const C128aListsArgs a{.positions = positions(),
                         .requests = requests(),
                         .block_table = entries_.pages.table_view(),
                         .ratio = spec_.ratio,
                         .page = entries_.pages.cache.page,
                         .pages = entries_.pages.cache.pages,
                         .decode_tokens = tokens_,
                         .lists = chosen_slots_.view({tokens_, choice_.width}),
                         .lengths = lengths_.view({tokens_}),
                         .target = target()};
  timed(kChoose, 4.0 * static_cast<double>(tokens_ * choice_.width), 0, [&] { c128a_lists(a); });
  kernels_[kChoose] = detail::last_chosen();
}

void Layer::locate_choice() {
  if (spec_.window > 0 && !spec_.compressed()) return;
  choice_width_ = chooser_->choice_.width;
  const Pages& pages = spec_.mla() ? kv_pages_ : entry_owner_->entries_.pages;
  const LocateArgs a{.ids = chooser_->choice_.ids.view({tokens_, choice_width_}),
                     .requests = requests(),
                     .block_table = pages.table_view(),
                     .page = pages.cache.page,
                     .pages = pages.cache.pages,
                     .slots = chosen_slots_.view({tokens_, choice_width_}),
                     .counts = lengths_.view({tokens_}),
                     .target = target()};
  timed(kChoose, 8.0 * static_cast<double>(tokens_ * choice_width_), 0, [&] { locate(a); });
  if (!spec_.indexed()) kernels_[kChoose] = detail::last_chosen();
}

void Layer::attend_to() {
  const Spec& s = spec_;
  const int64_t listed = chooser_->choice_.width;
  AttendArgs a{.q = q_ready_.view({tokens_, s.heads, s.record()}),
               .scale = s.scale,
               .out = out_.view({tokens_, s.heads, 512}),
               .target = target()};
  const bool entries = s.compressed() && listed > 0;
  const KvList chosen{
      .cache = s.mla() ? kv_pages_.cache : entry_owner_->entries_.pages.cache,
      .indices = entries || s.mla() ? chosen_slots_.view({tokens_, listed}) : Tensor{},
      .lengths = entries || s.mla() ? lengths_.view({tokens_}) : Tensor{}};
  if (s.mla()) {
    a.lists[0] = chosen;
  } else {
    a.lists[0] = {.cache = kv_pages_.cache,
                  .indices = window_.view({tokens_, s.window}),
                  .lengths = window_lengths_.view({tokens_})};
    if (entries) a.lists[1] = chosen;
    a.sink = weights_->vector("sinks");
  }
  a.workspace = grown(workspace_, queue_, attend_workspace_bytes(a));
  const WindowListsArgs window{.positions = positions(),
                               .requests = requests(),
                               .block_table = kv_pages_.table_view(),
                               .window = s.window,
                               .page = kv_pages_.cache.page,
                               .pages = kv_pages_.cache.pages,
                               .lists = window_.view({tokens_, s.window}),
                               .lengths = window_lengths_.view({tokens_}),
                               .target = target()};
  double keys = 0;
  for (int64_t t = 0; t < tokens_; ++t) {
    if (s.window > 0) keys += std::min(positions_.host()[t] + 1, s.window);
    if (s.mla() || s.compressed())
      keys += static_cast<double>(std::min<int64_t>(ends_.host()[t], listed));
  }
  const double record = static_cast<double>(page_bytes_used(kv_pages_.cache.format, 64)) / 64;
  const auto heads = static_cast<double>(s.heads);
  timed(kAttend, keys * record, 2 * heads * keys * static_cast<double>(s.record() + 512), [&] {
    if (s.window > 0) window_lists(window);
    attend(a);
  });
  kernels_[kAttend] = detail::last_chosen();
}

void Layer::project_output() {
  const Spec& s = spec_;
  const int64_t width = s.mla() ? s.heads * s.value : s.groups * s.rank;
  if (s.mla()) {
    const ProjectOutputArgs a{.attn = out_.view({tokens_, s.heads, 512}),
                              .w_uv = w_uv_.view({512, s.heads, s.value}),
                              .out = low_.view({tokens_, s.heads, s.value}),
                              .target = target()};
    timed(kProjectOutput, bytes_of(a.attn) + bytes_of(a.w_uv) + bytes_of(a.out),
          2.0 * static_cast<double>(tokens_ * a.w_uv.size()), [&] { winnow::project_output(a); });
  } else {
    const RotateArgs turn{.x = out_.view({tokens_, s.heads, 512}),
                          .positions = positions(),
                          .rope = rope(true),
                          .out = turned_.view({tokens_, s.heads, 512}),
                          .target = target()};
    timed(kRotate, 2 * bytes_of(turn.x), 0, [&] { rotate(turn); });
    kernels_[kRotate] = detail::last_chosen();
    const int64_t inner = s.heads * 512 / s.groups;
    const Tensor w = weights_->matrix("o_a_proj.weight");
    const Tensor in = turned_.view({tokens_, s.groups, inner});
    const Tensor out = low_.view({tokens_, s.groups, s.rank});
    const Tensor grouped = tensor(static_cast<bf16*>(w.data), {s.groups, s.rank, inner});
    timed(kProjectOutput, bytes_of(in) + bytes_of(w) + bytes_of(out),
          2.0 * static_cast<double>(tokens_ * w.size()), [&] { gemm_.groups(in, grouped, out); });
  }
  project(kProjectOutput, low_.view({tokens_, width}),
          s.mla() ? "o_proj.weight" : "o_b_proj.weight", y_.view({tokens_, s.hidden}));
}

double Layer::bytes_per_token() const {
  const auto of = [](const Pages& p, int32_t ratio) {
    if (p.requests == 0) return 0.0;
    return static_cast<double>(page_bytes(p.cache.format, p.cache.page)) / p.cache.page / ratio;
  };
  const int32_t ratio = std::max(spec_.ratio, 1);
  return of(entries_.pages, ratio) + of(keys_.pages, ratio) + (spec_.mla() ? of(kv_pages_, 1) : 0);
}

double Layer::bytes_per_request() const {
  double all =
      (entries_.state.bytes() + keys_.state.bytes()) / static_cast<double>(capacity_.requests);
  if (spec_.window > 0)
    all += spec_.window * static_cast<double>(page_bytes_used(kv_pages_.cache.format, 64)) / 64;
  return all;
}

const bf16* Layer::queries() const {
  q_ready_.to_host();
  return q_ready_.host();
}
const bf16* Layer::attended() const {
  out_.to_host();
  return out_.host();
}
const int32_t* Layer::chosen() const {
  const Array<int32_t>& ids = chooser_->choice_.ids;
  ids.to_host();
  return ids.host();
}

std::vector<bf16> Layer::gathered(const Pages& pages, int64_t request, int64_t count) const {
  pages.memory.to_host();
  Cache cache = pages.cache;
  cache.data = pages.memory.host();
  auto length = static_cast<int32_t>(count);
  std::vector<bf16> rows(static_cast<size_t>(count * record_dim(cache.format)));
  gather({.cache = cache,
          .block_table = tensor(pages.table.host() + request * pages.width, {1, pages.width}),
          .lengths = tensor(&length, {1}),
          .out = tensor(rows.data(), {count, record_dim(cache.format)}),
          .target = {.kernel = "reference"}});
  return rows;
}
std::vector<bf16> Layer::records(int64_t request, int64_t count) const {
  return gathered(kv_pages_, request, count);
}
std::vector<bf16> Layer::entries(int64_t request, int64_t count) const {
  return gathered(entry_owner_->entries_.pages, request, count);
}

std::vector<float> Layer::logits(int64_t token, int64_t count) {
  ScoreArgs a = score_args();
  const auto row = [&](Tensor& t) {
    t.data = static_cast<std::byte*>(t.data) + token * t.stride[0] * size_of(t.dtype);
    t.shape[0] = 1;
  };
  row(a.q);
  row(a.weights);
  row(a.requests);
  row(a.ends);
  const Array<float> out(queue_, count);
  a.logits = out.view({1, count});
  score(a);
  queue_.wait();
  out.to_host();
  return {out.host(), out.host() + count};
}

}  // namespace winnow::cli::whole
