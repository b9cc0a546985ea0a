// A few decode steps of one V3.2 layer: two sequences of different length grow by a token a step.
// An engine would get the tensors from its model; here they are random.
#include <winnow/winnow.h>

#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace {

using namespace winnow;

constexpr int64_t kHeads = 16, kIndexHeads = 8, kTopk = 64, kPage = 64, kPages = 16;
constexpr int64_t kRequests = 2, kTableWidth = 8, kSteps = 3;

std::mt19937 rng(1);

std::vector<bf16> random_bf16(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(count);
  for (bf16& x : values) x = {static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(rng)) >> 16)};
  return values;
}

// The two caches of a layer: latent records, and the indexer's keys.
struct Layer {
  std::vector<std::byte> records =
      std::vector<std::byte>(kPages * page_bytes(CacheFormat::kV32Fp8, kPage));
  std::vector<std::byte> key_bytes =
      std::vector<std::byte>(kPages * page_bytes(CacheFormat::kIndexKeys, kPage));
  Cache cache{
      .data = records.data(), .format = CacheFormat::kV32Fp8, .pages = kPages, .page = kPage};
  Cache keys{
      .data = key_bytes.data(), .format = CacheFormat::kIndexKeys, .pages = kPages, .page = kPage};

  // Stores tokens [first, last) of a request, as its prefill (or one decode step) would.
  void store(const std::vector<int32_t>& table, int request, int64_t first, int64_t last) {
    std::vector<int64_t> slots;
    for (int64_t p = first; p < last; ++p)
      slots.push_back(table[request * kTableWidth + p / kPage] * kPage + p % kPage);
    const int64_t n = last - first;
    const std::vector<bf16> kv = random_bf16(n * kV32.d_qk), k = random_bf16(n * kIndexDim);
    write({.kv = tensor(kv.data(), {n, kV32.d_qk}),
           .slots = tensor(slots.data(), {n}),
           .cache = cache});
    write({.kv = tensor(k.data(), {n, kIndexDim}),
           .slots = tensor(slots.data(), {n}),
           .cache = keys});
  }
};

}  // namespace

int main() try {
  // Once: capacities in, kernels chosen.
  Plan plan({.model = kV32,
             .heads = kHeads,
             .topk = kTopk,
             .index_heads = kIndexHeads,
             .page = kPage,
             .pages = kPages,
             .max_requests = kRequests,
             .max_tokens = kRequests});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  std::printf("winnow %s, attend by %s\n", version(), plan.kernel(Stage::kAttend));

  // Pages 0, 2, 4... belong to the first request, 1, 3, 5... to the second.
  std::vector<int32_t> table(kRequests * kTableWidth);
  for (int64_t r = 0; r < kRequests; ++r)
    for (int64_t w = 0; w < kTableWidth; ++w)
      table[r * kTableWidth + w] = static_cast<int32_t>(w * kRequests + r);
  Layer layer;
  std::vector<int32_t> lens = {400, 130};
  for (int r = 0; r < kRequests; ++r) layer.store(table, r, 0, lens[r]);

  const int64_t T = kRequests;  // one token a request
  std::vector<int32_t> ids(T * kTopk), slots(T * kTopk), counts(T);
  std::vector<float> logits(T * kTableWidth * kPage), lse(T * kHeads);
  std::vector<bf16> out(T * kHeads * kV32.d_v);
  for (int step = 0; step < kSteps; ++step) {
    // The new token of each request goes to the caches first: it may attend to itself.
    for (int r = 0; r < kRequests; ++r) {
      layer.store(table, r, lens[r], lens[r] + 1);
      ++lens[r];
    }

    const std::vector<int32_t> starts = {0, 1, 2};
    plan.refill({.query_starts = starts, .seq_lens = lens});
    const Tensor requests = tensor(plan.request_ids().data(), {T});
    const Tensor ends = tensor(plan.key_ends().data(), {T});
    const Tensor pages = tensor(table.data(), {kRequests, kTableWidth});

    const std::vector<e4m3> index_q(T * kIndexHeads * kIndexDim, e4m3{0x30});  // 0.5
    const std::vector<float> weights(T * kIndexHeads, 0.01f);
    score({.plan = &plan,
           .q = tensor(index_q.data(), {T, kIndexHeads, kIndexDim}),
           .weights = tensor(weights.data(), {T, kIndexHeads}),
           .keys = layer.keys,
           .block_table = pages,
           .requests = requests,
           .ends = ends,
           .logits = tensor(logits.data(), {T, kTableWidth * kPage})});
    select({.plan = &plan,
            .logits = tensor(logits.data(), {T, kTableWidth * kPage}),
            .ends = ends,
            .ids = tensor(ids.data(), {T, kTopk})});
    locate({.plan = &plan,
            .ids = tensor(ids.data(), {T, kTopk}),
            .requests = requests,
            .block_table = pages,
            .page = kPage,
            .pages = kPages,
            .slots = tensor(slots.data(), {T, kTopk}),
            .counts = tensor(counts.data(), {T})});
    const std::vector<bf16> q = random_bf16(T * kHeads * kV32.d_qk);
    AttendArgs attention{.plan = &plan,
                         .q = tensor(q.data(), {T, kHeads, kV32.d_qk}),
                         .scale = 0.1352f,  // 192^-1/2 * (0.1 ln 40 + 1)^2
                         .out = tensor(out.data(), {T, kHeads, kV32.d_v}),
                         .lse = tensor(lse.data(), {T, kHeads}),
                         .workspace = workspace};
    attention.lists[0] = {.cache = layer.cache, .indices = tensor(slots.data(), {T, kTopk})};
    attend(attention);

    for (int64_t t = 0; t < T; ++t) {
      std::printf("step %d, request %d: %d of %d keys, lse of head 0 %.3f\n", step,
                  static_cast<int>(t), counts[t], lens[t], lse[t * kHeads]);
      if (counts[t] != kTopk || !std::isfinite(lse[t * kHeads])) return EXIT_FAILURE;
    }
  }
  return EXIT_SUCCESS;
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return EXIT_FAILURE;
}
