// Decode steps of one V4 layer through the verbs. A token attends to two lists under one softmax:
// the last 128 tokens (a sliding window), and compressed states, one for every four tokens, of
// which the indexer picks the best. An engine would get the tensors from its model; here they are
// random.
#include <winnow/winnow.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

using namespace winnow;

constexpr int64_t kHeads = 16, kIndexHeads = 8, kPage = 64;
constexpr int64_t kWindow = kV4.window, kPicked = 64;  // widths of the two lists
constexpr int32_t kRatio = 4;                          // tokens per compressed state
constexpr int64_t kRequests = 2, kTokenPages = 16, kStatePages = 4, kSteps = 5;

std::mt19937 rng(1);

std::vector<bf16> random_bf16(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(count);
  for (bf16& x : values) x = {static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(rng)) >> 16)};
  return values;
}

// A paged cache and the pages of each request: every other one, so that tables matter.
struct Pages {
  CacheFormat format;
  int64_t width;  // pages of a request
  std::vector<std::byte> bytes =
      std::vector<std::byte>(kRequests * width * page_bytes(format, kPage));
  std::vector<int32_t> table = std::vector<int32_t>(kRequests * width);

  Pages(CacheFormat f, int64_t w) : format(f), width(w) {
    for (int64_t r = 0; r < kRequests; ++r)
      for (int64_t i = 0; i < width; ++i)
        table[r * width + i] = static_cast<int32_t>(i * kRequests + r);
  }
  Cache cache() {
    return {.data = bytes.data(), .format = format, .pages = kRequests * width, .page = kPage};
  }
  Tensor block_table() const { return tensor(table.data(), {kRequests, width}); }
};

struct Layer {
  Pages tokens{CacheFormat::kV4Fp8, kTokenPages};    // of the sliding window
  Pages states{CacheFormat::kV4Fp8, kStatePages};    // compressed
  Pages keys{CacheFormat::kIndexKeys, kStatePages};  // of the indexer: one for each state

  // Writes the tokens at these positions, and the states and index keys that they complete.
  void store(const std::vector<int32_t>& positions, const std::vector<int32_t>& requests) {
    const auto n = static_cast<int64_t>(positions.size());
    std::vector<int64_t> token_slots(n), state_slots(n);
    // With a ratio of 1 every token has a slot of its own.
    CompressedSlotsArgs slots{.positions = tensor(positions.data(), {n}),
                              .requests = tensor(requests.data(), {n}),
                              .block_table = tokens.block_table(),
                              .ratio = 1,
                              .page = kPage,
                              .pages = tokens.cache().pages,
                              .slots = tensor(token_slots.data(), {n})};
    compressed_slots(slots);
    // With a ratio of 4 every fourth has one; the others get -1, which write() skips.
    slots.block_table = states.block_table();
    slots.ratio = kRatio;
    slots.pages = states.cache().pages;
    slots.slots = tensor(state_slots.data(), {n});
    compressed_slots(slots);

    const std::vector<bf16> kv = random_bf16(n * kV4.d_qk), state_kv = random_bf16(n * kV4.d_qk);
    const std::vector<bf16> k = random_bf16(n * kIndexDim);
    write({.kv = tensor(kv.data(), {n, kV4.d_qk}),
           .slots = tensor(token_slots.data(), {n}),
           .cache = tokens.cache()});
    write({.kv = tensor(state_kv.data(), {n, kV4.d_qk}),
           .slots = tensor(state_slots.data(), {n}),
           .cache = states.cache()});
    write({.kv = tensor(k.data(), {n, kIndexDim}),
           .slots = tensor(state_slots.data(), {n}),
           .cache = keys.cache()});
  }
};

}  // namespace

int main() try {
  // Once: capacities in, kernels chosen.
  Plan plan({.model = kV4,
             .format = CacheFormat::kV4Fp8,
             .heads = kHeads,
             .topk = kWindow,
             .extra_topk = kPicked,
             .ratio = kRatio,
             .index_heads = kIndexHeads,
             .page = kPage,
             .pages = kRequests * kTokenPages,
             .max_requests = kRequests,
             .max_tokens = kRequests});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  std::printf("winnow %s, attend by %s\n", version(), plan.kernel(Stage::kAttend));

  // What the prefills of two requests would have left in the caches.
  Layer layer;
  std::vector<int32_t> lens = {700, 90}, positions, owners;
  for (int32_t r = 0; r < kRequests; ++r)
    for (int32_t p = 0; p < lens[r]; ++p) {
      positions.push_back(p);
      owners.push_back(r);
    }
  layer.store(positions, owners);

  const int64_t T = kRequests;  // one token a request
  std::vector<int32_t> window(T * kWindow), window_lengths(T), ids(T * kPicked);
  std::vector<int32_t> picked(T * kPicked), counts(T);
  std::vector<bf16> out(T * kHeads * kV4.d_v);
  std::vector<float> lse(T * kHeads);
  const std::vector<float> sink(kHeads, 0.5f);
  for (int step = 0; step < kSteps; ++step) {
    for (int32_t& n : lens) ++n;
    const std::vector<int32_t> starts = {0, 1, 2};
    plan.refill({.query_starts = starts, .seq_lens = lens});
    const Tensor requests = tensor(plan.request_ids().data(), {T});
    const Tensor ends = tensor(plan.key_ends().data(), {T});  // complete states: position / 4
    layer.store({lens[0] - 1, lens[1] - 1}, {0, 1});

    // The second list: the best of the states so far.
    const std::vector<e4m3> index_q(T * kIndexHeads * kIndexDim, e4m3{0x30});  // 0.5
    const std::vector<float> weights(T * kIndexHeads, 0.01f);
    score_select({.score = {.plan = &plan,
                            .q = tensor(index_q.data(), {T, kIndexHeads, kIndexDim}),
                            .weights = tensor(weights.data(), {T, kIndexHeads}),
                            .keys = layer.keys.cache(),
                            .block_table = layer.keys.block_table(),
                            .requests = requests,
                            .ends = ends},
                  .ids = tensor(ids.data(), {T, kPicked}),
                  .workspace = workspace});
    locate({.plan = &plan,
            .ids = tensor(ids.data(), {T, kPicked}),
            .requests = requests,
            .block_table = layer.states.block_table(),
            .page = kPage,
            .pages = layer.states.cache().pages,
            .slots = tensor(picked.data(), {T, kPicked}),
            .counts = tensor(counts.data(), {T})});

    // The first list: the window.
    window_lists({.plan = &plan,
                  .positions = tensor(plan.positions().data(), {T}),
                  .requests = requests,
                  .block_table = layer.tokens.block_table(),
                  .window = kWindow,
                  .page = kPage,
                  .pages = layer.tokens.cache().pages,
                  .lists = tensor(window.data(), {T, kWindow}),
                  .lengths = tensor(window_lengths.data(), {T})});

    const std::vector<bf16> q = random_bf16(T * kHeads * kV4.d_qk);
    AttendArgs attention{.plan = &plan,
                         .q = tensor(q.data(), {T, kHeads, kV4.d_qk}),
                         .scale = 0.0442f,  // 512^-1/2
                         .sink = tensor(sink.data(), {kHeads}),
                         .out = tensor(out.data(), {T, kHeads, kV4.d_v}),
                         .lse = tensor(lse.data(), {T, kHeads}),
                         .workspace = workspace};
    attention.lists[0] = {.cache = layer.tokens.cache(),
                          .indices = tensor(window.data(), {T, kWindow}),
                          .lengths = tensor(window_lengths.data(), {T})};
    attention.lists[1] = {.cache = layer.states.cache(),
                          .indices = tensor(picked.data(), {T, kPicked})};
    attend(attention);

    for (int64_t t = 0; t < T; ++t) {
      std::printf("step %d, request %d: window %d, %d of %d states, lse of head 0 %.3f\n", step,
                  static_cast<int>(t), window_lengths[t], counts[t], plan.key_ends()[t],
                  lse[t * kHeads]);
      const bool right = window_lengths[t] == std::min<int64_t>(lens[t], kWindow) &&
                         counts[t] == std::min<int64_t>(lens[t] / kRatio, kPicked);
      if (!right || !std::isfinite(lse[t * kHeads])) return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return EXIT_FAILURE;
}
