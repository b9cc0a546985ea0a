#include "whole/layer.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "core/kernel_table.h"

namespace winnow::cli::whole {

void Batch::add(int32_t request, int32_t first, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    positions.push_back(first + i);
    requests.push_back(request);
  }
}

Pages::Pages(const Queue& queue, CacheFormat format, const Capacity& c, int64_t records)
    : requests(c.requests), width(records / c.page + 1) {
  const int64_t count = requests * width;
  memory = Array<std::byte>(queue, count * page_bytes(format, c.page));
  table = Array<int32_t>(queue, count);
  for (int64_t i = 0; i < count; ++i)
    table.host()[i] = static_cast<int32_t>(i % width * requests + i / width);
  table.to_device();
  cache = {.data = memory.data(), .format = format, .pages = count, .page = c.page};
}

int64_t Pages::slot(int64_t request, int64_t record) const {
  return int64_t{table.host()[request * width + record / cache.page]} * cache.page +
         record % cache.page;
}

Layer::Layer(const Spec& spec, std::shared_ptr<const Weights> weights, const Queue& queue,
             const Capacity& capacity, const Sources& sources)
    : spec_(spec),
      weights_(std::move(weights)),
      queue_(queue),
      capacity_(capacity),
      entry_owner_(spec.own_entries ? this : sources.entries),
      chooser_(spec.chooses ? this : sources.choice),
      block_finder_(spec.within_blocks ? sources.blocks : this),
      gemm_(queue) {
  // Entries of another layer have that layer's ratio and RoPE.
  if (!spec.own_entries && spec.compressed()) spec_.ratio = sources.entries->spec_.ratio;
  const Spec& s = spec_;
  const int64_t tokens = capacity.tokens, context = capacity.context;
  const bool wide = capacity.bf16_caches;
  const Model& model = s.mla() ? kV32 : kV4;
  kv_pages_ = Pages(queue, wide ? model.bf16 : model.fp8, capacity, context);
  const CacheFormat key_format = wide ? CacheFormat::kIndexKeysBf16 : CacheFormat::kIndexKeys;
  const int64_t ring = s.values() * s.ratio;
  if (s.compressed() && s.own_entries) {
    entries_.pages = Pages(queue, wide ? model.bf16 : model.fp8, capacity, context / s.ratio);
    if (s.gate) entries_.state = Array<float>(queue, capacity.requests * ring * s.columns(512));
    entries_.rows = Array<float>(queue, tokens * s.columns(512));
    if (s.latent_keys) latent_ = Array<bf16>(queue, tokens * 512);
    entries_.slots = Array<int64_t>(queue, tokens);
  }
  if (s.indexed() && s.own_keys) {
    keys_.pages = Pages(queue, key_format, capacity, context / std::max(s.ratio, 1));
    keys_.slots = Array<int64_t>(queue, tokens);
    index_k_ = Array<bf16>(queue, tokens * 128);
    if (s.compressed() && !s.latent_keys) {
      keys_.state = Array<float>(queue, capacity.requests * ring * s.columns(128));
      keys_.rows = Array<float>(queue, tokens * s.columns(128));
    }
  }
  angles_ = Array<float>(queue, context * 64);
  rope_table({.theta = s.theta,
              .factor = s.factor,
              .original = s.original,
              .table = tensor(angles_.host(), {context, 2, 32})});
  angles_.to_device();
  positions_ = Array<int32_t>(queue, tokens);
  requests_ = Array<int32_t>(queue, tokens);
  ends_ = Array<int32_t>(queue, tokens);
  firsts_ = Array<int32_t>(queue, tokens);
  slots_ = Array<int64_t>(queue, tokens);
  q_a_ = Array<bf16>(queue, tokens * s.q_lora);
  kv_rows_ = Array<bf16>(queue, tokens * s.record());
  q_ = Array<bf16>(queue, tokens * s.heads * s.head());
  q_ready_ = Array<bf16>(queue, tokens * s.heads * s.record());
  out_ = Array<bf16>(queue, tokens * s.heads * 512);
  turned_ = Array<bf16>(queue, s.mla() ? 0 : tokens * s.heads * 512);
  low_ = Array<bf16>(queue, tokens * (s.mla() ? s.heads * s.value : s.groups * s.rank));
  y_ = Array<bf16>(queue, tokens * s.hidden);
  if (s.indexed()) {
    index_q_ = Array<bf16>(queue, tokens * s.index_heads * 128);
    index_ready_ = Array<std::byte>(queue, tokens * s.index_heads * 128 * (wide ? 2 : 1));
    index_w_ = Array<bf16>(queue, tokens * s.index_heads);
    index_weights_ = Array<float>(queue, tokens * s.index_heads);
  }
  if (s.window > 0) {
    window_ = Array<int32_t>(queue, tokens * s.window);
    window_lengths_ = Array<int32_t>(queue, tokens);
  }
  const int64_t keys = s.mla() ? context : s.compressed() ? context / s.ratio : 0;
  if (s.chooses && (s.mla() || s.compressed())) {
    // One column at least: an indexer runs before the first entry closes, too.
    const int64_t most =
        s.indexed() ? std::clamp<int64_t>(keys, 1, s.topk) : c128a_width(context, s.ratio);
    choice_.ids = Array<int32_t>(queue, tokens * most);
    choice_.block_count = std::min<int64_t>(kMostBlocks, (keys + kBlock - 1) / kBlock);
    if (s.finds_blocks) choice_.blocks = Array<int32_t>(queue, tokens * choice_.block_count);
  }
  if (s.mla() || s.compressed()) {
    const int64_t most = chooser_->choice_.ids.size() / chooser_->capacity_.tokens;
    chosen_slots_ = Array<int32_t>(queue, tokens * most);
    lengths_ = Array<int32_t>(queue, tokens);
  }
  if (!s.mla()) return;
  w_uk_ = Array<bf16>(queue, 512 * s.heads * s.nope);
  w_uv_ = Array<bf16>(queue, 512 * s.heads * s.value);
  const int64_t both = s.nope + s.value;
  split_kv_b({.weight = tensor(weights_->matrix_on_host("kv_b_proj.weight"), {512, s.heads, both},
                               {1, both * 512, 512}),
              .w_uk = tensor(w_uk_.host(), {512, s.heads, s.nope}),
              .w_uv = tensor(w_uv_.host(), {512, s.heads, s.value})});
  w_uk_.to_device();
  w_uv_.to_device();
}

template <class F>
void Layer::timed(Timed stage, double bytes, double flops, F&& call) {
  queue_.wait();
  const auto start = std::chrono::steady_clock::now();
  call();
  queue_.wait();
  Total& t = totals_[stage];
  t.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  t.bytes += bytes;
  t.flops += flops;
  ++t.calls;
}

// Weights count, too: in decode they are most of it.
void Layer::project(Timed stage, const Tensor& x, const std::string& name, const Tensor& out) {
  const Tensor w = weights_->matrix(name);
  timed(stage, bytes_of(x) + bytes_of(w) + bytes_of(out),
        2.0 * static_cast<double>(x.shape[0] * w.size()), [&] { gemm_(x, w, out); });
  kernels_[stage] = queue_.cuda() ? "cuBLAS" : "loops";
}

Target Layer::target() const {
  return {.device = queue_.device(),
          .kernel = capacity_.kernel.empty() ? nullptr : capacity_.kernel.c_str()};
}
Rope Layer::rope(bool inverse) const {
  return {.table = angles_.view({capacity_.context, 2, 32}), .inverse = inverse};
}
// Of index queries and of V3.2's index keys.
Rope Layer::index_rope() const {
  Rope turn = rope();
  turn.pairs = spec_.index_pairs;
  turn.slice = spec_.index_slice;
  return turn;
}
Norm Layer::norm(const std::string& name) const {
  return {.weight = weights_->vector(name), .eps = spec_.eps};
}

int64_t Layer::begin(const Batch& batch) {
  tokens_ = batch.tokens();
  const int32_t ratio = std::max(spec_.ratio, 1);
  int32_t context = 0;
  for (int64_t t = 0; t < tokens_; ++t) {
    const int32_t p = batch.positions[static_cast<size_t>(t)];
    positions_.host()[t] = p;
    requests_.host()[t] = batch.requests[static_cast<size_t>(t)];
    ends_.host()[t] = (p + 1) / ratio;
    firsts_.host()[t] = (p + 1) % ratio == 0 ? p / ratio * ratio : -1;
    slots_.host()[t] = kv_pages_.slot(requests_.host()[t], p);
    context = std::max(context, p + 1);
  }
  for (const Array<int32_t>* a : {&positions_, &requests_, &ends_, &firsts_}) a->to_device(tokens_);
  slots_.to_device(tokens_);
  return context;
}

void Layer::keep(const Array<bf16>& x) {
  project_input(x);
  write_records();
  if (spec_.compressed() && spec_.own_entries) compress_entries();
  if (!(spec_.indexed() && spec_.own_keys && spec_.compressed())) return;
  if (spec_.latent_keys) keys_of_latents();
  else compress_keys();
}

void Layer::fill(const Batch& batch, const Array<bf16>& x) {
  const std::array<Total, kTimed> before = totals_;
  begin(batch);
  if (tokens_ > 0) keep(x);
  totals_ = before;  // not a step's work
}

void Layer::run(const Batch& batch, const Array<bf16>& x) {
  const int64_t context = begin(batch);
  if (tokens_ == 0) return;
  keep(x);
  project_query();
  prepare();
  if (spec_.indexed()) choose(context);
  else if (spec_.compressed() && spec_.chooses) list_all(context);
  if (!(spec_.compressed() && chooser_ == this && !spec_.indexed())) locate_choice();
  attend_to();
  project_output();
}

void Layer::project_input(const Array<bf16>& x) {
  const Spec& s = spec_;
  const Tensor in = x.view({tokens_, s.hidden});
  project(kProjectInput, in, "q_a_proj.weight", q_a_.view({tokens_, s.q_lora}));
  project(kProjectInput, in, s.mla() ? "kv_a_proj_with_mqa.weight" : "kv_proj.weight",
          kv_rows_.view({tokens_, s.record()}));
  // A compressor's rows stay in fp32: values, then scores.
  const auto project_rows = [&](const std::string& module, const Array<float>& rows, int64_t d) {
    const int64_t width = s.values() * d, all = s.columns(d);
    project(kProjectInput, in, module + ".kv_proj.weight", rows.columns(tokens_, all, 0, width));
    if (s.gate)
      project(kProjectInput, in, module + ".gate_proj.weight",
              rows.columns(tokens_, all, width, width));
  };
  if (s.compressed() && s.own_entries) project_rows("compressor", entries_.rows, 512);
  if (!s.indexed()) return;
  const Tensor weights = index_w_.view({tokens_, s.index_heads});
  if (s.mla()) {
    project(kProjectInput, in, "indexer.wk.weight", index_k_.view({tokens_, 128}));
    project(kProjectInput, in, "indexer.weights_proj.weight", weights);
    return;
  }
  project(kProjectInput, in, "compressor.indexer.scorer.weights_proj.weight", weights);
  if (s.own_keys && !s.latent_keys) project_rows("compressor.indexer", keys_.rows, 128);
}

void Layer::write_records() {
  const Spec& s = spec_;
  NormWriteArgs a{.target = target()};
  const Tensor q = q_a_.view({tokens_, s.q_lora});
  a.norm.rows[0] = {
      .x = q, .out = q, .norm = norm(s.mla() ? "q_a_layernorm.weight" : "q_a_norm.weight")};
  const int64_t width = s.record();
  a.write[0] = {.kv = kv_rows_.columns(tokens_, width, 0, 512),
                .slots = slots_.view({tokens_}),
                .cache = kv_pages_.cache,
                .prologue = {.norm = norm(s.mla() ? "kv_a_layernorm.weight" : "kv_norm.weight"),
                             .rope = rope(),
                             .positions = positions()}};
  if (s.mla()) a.write[0].rope = kv_rows_.columns(tokens_, width, 512, kRopeDim);
  double bytes = 2 * bytes_of(q) + bytes_of(a.write[0].kv) +
                 static_cast<double>(tokens_ * page_bytes_used(kv_pages_.cache.format, 64)) / 64;
  if (s.mla() && s.indexed()) {
    a.write[1] = {.kv = index_k_.view({tokens_, 128}),
                  .slots = slots_.view({tokens_}),
                  .cache = keys_.pages.cache,
                  .prologue = {.norm = {.kind = NormKind::kLayer,
                                        .weight = weights_->vector("indexer.k_norm.weight"),
                                        .bias = weights_->vector("indexer.k_norm.bias")},
                               .rope = index_rope(),
                               .positions = positions()}};
    bytes += static_cast<double>(tokens_ * (256 + 132));
  }
  timed(kWrite, bytes, 0, [&] { norm_write(a); });
  kernels_[kWrite] = detail::last_chosen();
}

// Where the entries that the step closes are stored.
CompressedSlotsArgs Layer::slots_in(const Entries& entries) const {
  return {.positions = positions(),
          .requests = requests(),
          .block_table = entries.pages.table_view(),
          .ratio = spec_.ratio,
          .page = entries.pages.cache.page,
          .pages = entries.pages.cache.pages,
          .slots = entries.slots.view({tokens_}),
          .target = target()};
}

// Rows of d values into entries, with the weights of a module.
CompressArgs Layer::compressor(const Entries& entries, const std::string& module, int64_t d) const {
  const Spec& s = spec_;
  CompressArgs a{.rows = entries.rows.view({tokens_, s.columns(d)}),
                 .positions = positions(),
                 .requests = requests(),
                 .ratio = s.ratio,
                 .overlap = s.overlap,
                 .gate = s.gate,
                 .norm = norm(module + ".kv_norm.weight"),
                 .rope = rope(),
                 .slots = entries.slots.view({tokens_}),
                 .cache = entries.pages.cache,
                 .target = target()};
  const int64_t ring = s.values() * s.ratio;
  if (s.gate)
    a.state = {.rows = entries.state.view({capacity_.requests, ring, s.columns(d)}), .ring = true};
  if (s.bias) a.bias = weights_->vector(module + ".position_bias");
  return a;
}

void Layer::compress_rows(const Entries& entries, const CompressArgs& args) {
  const CompressedSlotsArgs slots = slots_in(entries);
  timed(kCompress, bytes_of(args.rows) * (args.gate ? 2 : 1), 0, [&] {
    compressed_slots(slots);
    compress(args);
  });
}

void Layer::compress_entries() {
  CompressArgs a = compressor(entries_, "compressor", 512);
  if (spec_.latent_keys) a.latent = latent_.view({tokens_, 512});
  compress_rows(entries_, a);
  kernels_[kCompress] = detail::last_chosen();
}

void Layer::compress_keys() { compress_rows(keys_, compressor(keys_, "compressor.indexer", 128)); }

// V4.1: index keys from the entries before RoPE. Rows that close no entry have no slot.
void Layer::keys_of_latents() {
  const Tensor keys = index_k_.view({tokens_, 128});
  project(kProjectInput, latent_.view({tokens_, 512}), "indexer.wk.weight", keys);
  const CompressedSlotsArgs slots = slots_in(keys_);
  WriteArgs a{.kv = keys,
              .slots = keys_.slots.view({tokens_}),
              .cache = keys_.pages.cache,
              .prologue = {.norm = norm("indexer.k_norm.weight"),
                           .rope = rope(),
                           .positions = firsts_.view({tokens_})},
              .target = target()};
  timed(kWrite, bytes_of(keys), 0, [&] {
    compressed_slots(slots);
    write(a);
  });
}

void Layer::project_query() {
  const Spec& s = spec_;
  const Tensor in = q_a_.view({tokens_, s.q_lora});
  project(kProjectQuery, in, "q_b_proj.weight", q_.view({tokens_, s.heads * s.head()}));
  if (s.indexed())
    project(kProjectQuery, in,
            s.mla() ? "indexer.wq_b.weight" : "compressor.indexer.q_b_proj.weight",
            index_q_.view({tokens_, s.index_heads * 128}));
  if (!s.mla()) return;
  const AbsorbQueryArgs a{
      .q_nope = tensor(q_.data(), {tokens_, s.heads, s.nope}, {s.heads * s.head(), s.head(), 1}),
      .w_uk = w_uk_.view({512, s.heads, s.nope}),
      .out = tensor(q_ready_.data(), {tokens_, s.heads, 512}, {s.heads * 576, 576, 1}),
      .target = target()};
  timed(kProjectQuery, bytes_of(a.q_nope) + bytes_of(a.w_uk) + bytes_of(a.out),
        2.0 * static_cast<double>(tokens_ * a.w_uk.size()), [&] { absorb_query(a); });
}

void Layer::prepare() {
  const Spec& s = spec_;
  const int64_t all = s.heads * s.head(), width = s.mla() ? kRopeDim : 512;
  const int64_t ready = s.heads * s.record();
  PrepareQueriesArgs a{.target = target()};
  a.query = {.q = tensor(q_.data() + s.nope, {tokens_, s.heads, width}, {all, s.head(), 1}),
             .norm = {.kind = s.q_norm ? NormKind::kRms : NormKind::kNone, .eps = s.eps},
             .positions = positions(),
             .rope = rope(),
             .out = tensor(q_ready_.data() + (s.mla() ? 512 : 0), {tokens_, s.heads, width},
                           {ready, s.record(), 1})};
  double bytes = 2 * bytes_of(a.query.q);
  if (s.indexed()) {
    const Tensor out =
        capacity_.bf16_caches
            ? tensor(reinterpret_cast<bf16*>(index_ready_.data()), {tokens_, s.index_heads, 128})
            : tensor(reinterpret_cast<e4m3*>(index_ready_.data()), {tokens_, s.index_heads, 128});
    a.index = {.q = index_q_.view({tokens_, s.index_heads, 128}),
               .weights = index_w_.view({tokens_, s.index_heads}),
               .positions = positions(),
               .rope = index_rope(),
               .factor = 1 / std::sqrt(static_cast<float>(s.index_heads * 128)),
               .out = out,
               .out_weights = index_weights_.view({tokens_, s.index_heads})};
    bytes += bytes_of(a.index.q) + bytes_of(out);
  }
  timed(kPrepare, bytes, 0, [&] { prepare_queries(a); });
  kernels_[kPrepare] = detail::last_chosen();
}

}  // namespace winnow::cli::whole
