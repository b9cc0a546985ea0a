// A mixed batch of one V3.2 layer, part by part: a decode that reads the fp8 pages, and prefills
// whose pages are gathered into a contiguous bf16 workspace first, chunk by chunk. pipeline() runs
// this loop in one call; an engine that wants to overlap or replace a stage writes it out.
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

constexpr int64_t kHeads = 16, kIndexHeads = 8, kTopk = 64, kPage = 64, kPages = 40;
constexpr int64_t kTableWidth = 8;

std::mt19937 rng(1);

std::vector<bf16> random_bf16(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<bf16> values(count);
  for (bf16& x : values) x = {static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(rng)) >> 16)};
  return values;
}

Tensor view(std::span<const int32_t> s) {
  return tensor(s.data(), {static_cast<int64_t>(s.size())});
}

// Entries [first, last) of the first dimension.
Tensor rows(Tensor t, int64_t first, int64_t last) {
  t.data = static_cast<std::byte*>(t.data) + first * t.stride[0] * size_of(t.dtype);
  t.shape[0] = last - first;
  return t;
}

}  // namespace

int main() try {
  // One decode, then three prefills: of 30, 100 and 64 new tokens in sequences that have more. The
  // workspace is small on purpose, so that the prefills take more than one chunk.
  const std::vector<int32_t> lens = {400, 330, 100, 280}, starts = {0, 1, 31, 131, 195};
  const auto requests = static_cast<int64_t>(lens.size());
  Plan plan({.model = kV32,
             .heads = kHeads,
             .topk = kTopk,
             .index_heads = kIndexHeads,
             .page = kPage,
             .pages = kPages,
             .max_requests = 8,
             .max_tokens = 256,
             .max_context = kTableWidth * kPage,
             .mode = Mode::kSeparate,
             .workspace_rows = 450});
  plan.refill({.query_starts = starts, .seq_lens = lens});
  const int64_t T = plan.tokens();

  // Caches, and every token of every sequence in them.
  std::vector<std::byte> records(kPages * page_bytes(CacheFormat::kV32Fp8, kPage));
  std::vector<std::byte> key_bytes(kPages * page_bytes(CacheFormat::kIndexKeys, kPage));
  const Cache cache{
      .data = records.data(), .format = CacheFormat::kV32Fp8, .pages = kPages, .page = kPage};
  const Cache keys{
      .data = key_bytes.data(), .format = CacheFormat::kIndexKeys, .pages = kPages, .page = kPage};
  std::vector<int32_t> table(requests * kTableWidth);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>((i * 7) % kPages);
  const Tensor pages = tensor(table.data(), {requests, kTableWidth});
  for (int64_t r = 0; r < requests; ++r) {
    std::vector<int64_t> slots;
    slots.reserve(lens[r]);
    for (int64_t p = 0; p < lens[r]; ++p)
      slots.push_back(table[r * kTableWidth + p / kPage] * kPage + p % kPage);
    const std::vector<bf16> kv = random_bf16(lens[r] * kV32.d_qk);
    const std::vector<bf16> k = random_bf16(lens[r] * kIndexDim);
    write({.kv = tensor(kv.data(), {lens[r], kV32.d_qk}),
           .slots = tensor(slots.data(), {lens[r]}),
           .cache = cache});
    write({.kv = tensor(k.data(), {lens[r], kIndexDim}),
           .slots = tensor(slots.data(), {lens[r]}),
           .cache = keys});
  }

  // The ids that each token attends to, all tokens at once.
  std::vector<std::byte> workspace(plan.workspace_bytes());
  std::vector<int32_t> ids(T * kTopk), located(T * kTopk), slots(T * kTopk);
  const std::vector<e4m3> index_q(T * kIndexHeads * kIndexDim, e4m3{0x30});  // 0.5
  const std::vector<float> weights(T * kIndexHeads, 0.01f);
  score_select({.score = {.plan = &plan,
                          .q = tensor(index_q.data(), {T, kIndexHeads, kIndexDim}),
                          .weights = tensor(weights.data(), {T, kIndexHeads}),
                          .keys = keys,
                          .block_table = pages,
                          .requests = view(plan.request_ids()),
                          .ends = view(plan.key_ends())},
                .ids = tensor(ids.data(), {T, kTopk}),
                .workspace = workspace});
  // Decodes: slots of the pages. Prefills: rows of the workspace that their chunk will be in.
  LocateArgs place{.plan = &plan,
                   .ids = tensor(ids.data(), {T, kTopk}),
                   .requests = view(plan.request_ids()),
                   .block_table = pages,
                   .page = kPage,
                   .pages = kPages,
                   .prefill_requests = view(plan.prefill_requests()),
                   .workspace_starts = view(plan.workspace_starts()),
                   .workspace_rows = plan.options().workspace_rows,
                   .slots = tensor(located.data(), {T, kTopk})};
  locate(place);

  // Part by part. A chunk's rows are overwritten by the next chunk's.
  const int64_t room = plan.options().workspace_rows, decodes = plan.split().decodes;
  std::vector<bf16> gathered(room * kV32.d_qk);
  const Cache chunk{.data = gathered.data(),
                    .format = CacheFormat::kV32Bf16,
                    .pages = 1,
                    .page = static_cast<int32_t>(room)};
  const std::vector<bf16> q = random_bf16(T * kHeads * kV32.d_qk);
  std::vector<bf16> out(T * kHeads * kV32.d_v);
  std::vector<float> lse(T * kHeads), direct_lse(T * kHeads);
  const Tensor all_q = tensor(q.data(), {T, kHeads, kV32.d_qk});
  const Tensor all_out = tensor(out.data(), {T, kHeads, kV32.d_v});
  constexpr float kScale = 0.1352f;  // 192^-1/2 * (0.1 ln 40 + 1)^2
  for (size_t p = 0; p < plan.parts().size(); ++p) {
    const Part& part = plan.parts()[p];
    if (part.gathered) {
      // The arrays by prefill request begin behind the decodes.
      const int64_t first = part.first_request - decodes, last = part.last_request - decodes;
      gather({.plan = &plan,
              .cache = cache,
              .block_table = rows(pages, part.first_request, part.last_request),
              .starts = rows(view(plan.gather_starts()), first, last),
              .lengths = rows(view(plan.gather_lens()), first, last),
              .out_starts = rows(view(plan.gather_rows()), first, last),
              .out = tensor(gathered.data(), {room, kV32.d_qk})});
    }
    AttendArgs attention{
        .plan = &plan,
        .part = static_cast<int32_t>(p),
        .q = rows(all_q, part.first_token, part.last_token),
        .scale = kScale,
        .out = rows(all_out, part.first_token, part.last_token),
        .lse = rows(tensor(lse.data(), {T, kHeads}), part.first_token, part.last_token),
        .workspace = workspace};
    attention.lists[0] = {
        .cache = part.gathered ? chunk : cache,
        .indices = rows(tensor(located.data(), {T, kTopk}), part.first_token, part.last_token)};
    attend(attention);
    std::printf("part %zu: tokens %d to %d, %s\n", p, part.first_token, part.last_token - 1,
                part.gathered ? "gathered" : "from the pages");
  }

  // The same without parts: every token from the pages. The results agree up to rounding.
  place.plan = nullptr;
  place.prefill_requests = {};
  place.workspace_starts = {};
  place.slots = tensor(slots.data(), {T, kTopk});
  locate(place);
  AttendArgs direct{
      .q = all_q, .scale = kScale, .out = all_out, .lse = tensor(direct_lse.data(), {T, kHeads})};
  direct.lists[0] = {.cache = cache, .indices = tensor(slots.data(), {T, kTopk})};
  attend(direct);
  float largest = 0;
  for (size_t i = 0; i < lse.size(); ++i)
    largest = std::max(largest, std::abs(lse[i] - direct_lse[i]));
  std::printf("largest difference of lse from attention without parts: %.4f\n", largest);
  return plan.parts().size() > 2 && largest < 0.05f ? EXIT_SUCCESS : EXIT_FAILURE;
} catch (const Error& e) {
  std::fprintf(stderr, "%s\n", e.what());
  return EXIT_FAILURE;
}
