// One attention layer of a real model, from the normalised hidden state x to the layer's output y:
// projections, winnow's verbs between them, and the caches and states of several requests.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "whole/array.h"
#include "whole/products.h"
#include "whole/spec.h"
#include "whole/weights.h"
#include "winnow/winnow.h"

namespace winnow::cli::whole {

// Tokens of a step: those of a request stand next to each other, in ascending positions.
struct Batch {
  std::vector<int32_t> positions, requests;
  int64_t tokens() const { return static_cast<int64_t>(positions.size()); }
  void add(int32_t request, int32_t first, int32_t count);
};

struct Capacity {
  int64_t requests = 1, tokens = 1, context = 1;  // at once; of a step; of a request
  int32_t page = 64;
  bool bf16_caches = false;
  std::string kernel;  // "" takes the fastest of each verb
};

enum Timed {
  kProjectInput,
  kWrite,
  kCompress,
  kProjectQuery,
  kPrepare,
  kChoose,
  kAttend,
  kRotate,
  kProjectOutput,
  kTimed
};
inline constexpr const char* kTimedNames[kTimed] = {
    "input projections", "norm, write", "compress", "query projections",
    "prepare queries",   "choose",      "attend",   "rotate",
    "output projections"};

inline constexpr int32_t kBlock = 8, kMostBlocks = 2048;  // V4.1's candidates

inline double bytes_of(const Tensor& t) { return static_cast<double>(t.size() * size_of(t.dtype)); }

struct Total {
  double seconds = 0, bytes = 0, flops = 0;
  int64_t calls = 0;
};

// Pages of one kind of records, dealt out to the requests in turn, so that a request's do not lie
// side by side.
struct Pages {
  Pages() = default;
  Pages(const Queue& queue, CacheFormat format, const Capacity& capacity, int64_t records);
  Tensor table_view() const { return table.view({requests, width}); }
  int64_t slot(int64_t request, int64_t record) const;

  Array<std::byte> memory;
  Array<int32_t> table;
  Cache cache;
  int64_t requests = 0, width = 0;
};

// What a compressor makes and keeps: rows of a step become records, some rows stay as its state.
struct Entries {
  Pages pages;
  Array<float> rows, state;
  Array<int64_t> slots;
};

// What a layer leaves for the layers that take its choice.
struct Choice {
  Array<int32_t> ids, blocks;
  int64_t width = 0, block_count = 0;
};

class Layer {
 public:
  // The layers whose caches and whose choice this one reads where it has none of its own; the layer
  // that found blocks for later ones.
  struct Sources {
    Layer *entries = nullptr, *choice = nullptr, *blocks = nullptr;
  };
  Layer(const Spec& spec, std::shared_ptr<const Weights> weights, const Queue& queue,
        const Capacity& capacity, const Sources& sources);

  // y [T, hidden] of x [T, hidden]: timed, and left in y().
  void run(const Batch& batch, const Array<bf16>& x);
  // What the tokens leave in caches and states, and nothing else: a prefix from elsewhere.
  void fill(const Batch& batch, const Array<bf16>& x);

  const Spec& spec() const { return spec_; }
  const Weights& weights() const { return *weights_; }
  const Array<bf16>& y() const { return y_; }
  const std::array<Total, kTimed>& totals() const { return totals_; }
  const std::array<std::string, kTimed>& kernels() const { return kernels_; }
  void forget_times() { totals_ = {}; }
  // Bytes that a token adds to the caches, and that a request holds besides.
  double bytes_per_token() const;
  double bytes_per_request() const;

  // Of the last run, on the host, for the comparison: all tokens.
  const bf16* queries() const;    // [T, H, record], as attend() took them
  const bf16* attended() const;   // [T, H, 512], before RoPE turns back
  const int32_t* chosen() const;  // [T, chosen_width()]: ids of entries (V3.2: tokens)
  int64_t chosen_width() const { return choice_width_; }
  // Records of a request, dequantised: [count, record()].
  std::vector<bf16> records(int64_t request, int64_t count) const;
  std::vector<bf16> entries(int64_t request, int64_t count) const;
  // The indexer's logits of one token of the last run over all entries that it sees.
  std::vector<float> logits(int64_t token, int64_t count);

 private:
  template <class F>
  void timed(Timed stage, double bytes, double flops, F&& call);
  void project(Timed stage, const Tensor& x, const std::string& name, const Tensor& out);
  Target target() const;
  Tensor positions() const { return positions_.view({tokens_}); }
  Tensor requests() const { return requests_.view({tokens_}); }
  Rope rope(bool inverse = false) const;
  Rope index_rope() const;
  Norm norm(const std::string& name) const;
  std::vector<bf16> gathered(const Pages& pages, int64_t request, int64_t count) const;

  int64_t begin(const Batch& batch);  // gives the longest context
  void keep(const Array<bf16>& x);
  void project_input(const Array<bf16>& x);
  void write_records();
  CompressedSlotsArgs slots_in(const Entries& entries) const;
  CompressArgs compressor(const Entries& entries, const std::string& module, int64_t d) const;
  void compress_rows(const Entries& entries, const CompressArgs& args);
  void compress_entries();
  void compress_keys();
  void keys_of_latents();
  void project_query();
  void prepare();
  void choose(int64_t context);
  void list_all(int64_t context);
  SelectBlocks blocks(int64_t keys);
  void locate_choice();
  void attend_to();
  void project_output();
  ScoreArgs score_args();

  Spec spec_;
  std::shared_ptr<const Weights> weights_;
  const Queue& queue_;
  Capacity capacity_;
  Layer *entry_owner_, *chooser_, *block_finder_;  // may be this layer
  mutable Gemm gemm_;
  int64_t tokens_ = 0, choice_width_ = 0;

  // What stays between steps.
  Pages kv_pages_;
  Entries entries_, keys_;  // index keys: in V3.2 and V4.1 not compressed, so pages and slots alone
  Array<float> angles_;
  Array<bf16> w_uk_, w_uv_;
  // Inputs of a step and what its calls hand on.
  Array<int32_t> positions_, requests_, ends_, firsts_;
  Array<int64_t> slots_;
  Array<bf16> q_a_, kv_rows_, index_k_, index_w_, q_, q_ready_, index_q_, out_, turned_, low_, y_;
  Array<bf16> latent_;
  Array<float> index_weights_;
  Array<std::byte> index_ready_, workspace_;
  Array<int32_t> window_, window_lengths_, chosen_slots_, lengths_;
  Choice choice_;

  std::array<Total, kTimed> totals_;
  std::array<std::string, kTimed> kernels_;
};

}  // namespace winnow::cli::whole
