// One decode step of a V3.2 layer whose context is spread over the ranks of an MPI job:
//   mpirun -n 4 example_parallel
// Each rank holds every fourth run of 64 positions, attends to its members of the top-k with all
// heads, and gets the output of its own heads. Rank 0 compares the result with one rank's.
#include <winnow/mpi.h>
#include <winnow/winnow.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int32_t kHeads = 16, kIndexHeads = 4, kTopk = 256, kPage = 64, kContext = 2000;

// A number in [-1, 1) that every rank computes alike.
float number(uint64_t i) {
  uint64_t x = i * 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>((x ^ x >> 27) >> 40 & 0xffffff) / (1 << 23) - 1;
}
winnow::bf16 bf16_of(float x) {
  uint32_t bits;
  static_assert(sizeof bits == sizeof x);
  __builtin_memcpy(&bits, &x, sizeof bits);
  return {static_cast<uint16_t>(bits >> 16)};
}
float float_of(winnow::bf16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &bits, sizeof f);
  return f;
}

// One request of kContext tokens, of which the last is new. Gives [heads of this rank, 512].
std::vector<winnow::bf16> decode(const winnow::Parallel& parallel) {
  const winnow::Shard shard = parallel.shard();
  // This rank's pages, and where a position stands in them: -1 for what others hold.
  const int64_t pages = shard.local_length(kContext) / kPage + 1;
  const auto slot = [&](int64_t p) { return shard.owns(p) ? shard.local(p) : int64_t{-1}; };
  std::vector<int32_t> table(pages);
  for (int64_t i = 0; i < pages; ++i) table[i] = static_cast<int32_t>(i);
  std::vector<std::byte> latent(pages * winnow::page_bytes(winnow::CacheFormat::kV32Fp8, kPage));
  std::vector<std::byte> keys(pages * winnow::page_bytes(winnow::CacheFormat::kIndexKeys, kPage));
  const winnow::Cache cache{latent.data(), winnow::CacheFormat::kV32Fp8, pages, kPage};
  const winnow::Cache index{keys.data(), winnow::CacheFormat::kIndexKeys, pages, kPage};

  // The plan's constructor and refill() compare options, kernels and batch over the ranks.
  winnow::Plan plan({.heads = kHeads,
                     .topk = kTopk,
                     .index_heads = kIndexHeads,
                     .page = kPage,
                     .pages = pages,
                     .max_requests = 1,
                     .max_tokens = 1,
                     .max_context = kContext,
                     .parallel = parallel});
  const std::vector<int32_t> starts = {0, 1}, lengths = {kContext};
  plan.refill({.query_starts = starts, .seq_lens = lengths});

  // What came before the new token; the positions of other ranks are written by them.
  std::vector<winnow::bf16> kv(kContext * 576), k(kContext * 128);
  std::vector<int64_t> slots(kContext);
  for (size_t i = 0; i < kv.size(); ++i) kv[i] = bf16_of(0.2f * number(i));
  for (size_t i = 0; i < k.size(); ++i) k[i] = bf16_of(number(i + 1000000000));
  for (int64_t p = 0; p < kContext; ++p) slots[p] = slot(p);
  constexpr int64_t kOld = kContext - 1;
  winnow::write({.kv = winnow::tensor(kv.data(), {kOld, 576}),
                 .slots = winnow::tensor(slots.data(), {kOld}),
                 .cache = cache});
  winnow::write({.kv = winnow::tensor(k.data(), {kOld, 128}),
                 .slots = winnow::tensor(slots.data(), {kOld}),
                 .cache = index});

  std::vector<winnow::bf16> q(kHeads * 576);
  std::vector<winnow::e4m3> index_q(kIndexHeads * 128);
  std::vector<float> weights(kIndexHeads, 1.0f);
  for (size_t i = 0; i < q.size(); ++i) q[i] = bf16_of(1.7f * number(i + 2000000000));
  for (size_t i = 0; i < index_q.size(); ++i)  // 1.0 and -1.0
    index_q[i] = {static_cast<uint8_t>(number(i + 3000000000) < 0 ? 0xb8 : 0x38)};

  const int32_t ranks = parallel.comm ? parallel.comm->size() : 1;
  const int64_t own = kHeads / ranks;
  std::vector<winnow::bf16> out(own * 512);
  std::vector<std::byte> workspace(winnow::pipeline_workspace_bytes(plan));
  winnow::pipeline({.plan = &plan,
                    .kv = winnow::tensor(kv.data() + kOld * 576, {1, 576}),
                    .slots = winnow::tensor(slots.data() + kOld, {1}),
                    .cache = cache,
                    .block_table = winnow::tensor(table.data(), {1, pages}),
                    .indexer = {.k = winnow::tensor(k.data() + kOld * 128, {1, 128}),
                                .slots = winnow::tensor(slots.data() + kOld, {1}),
                                .keys = index,
                                .block_table = winnow::tensor(table.data(), {1, pages}),
                                .q = winnow::tensor(index_q.data(), {1, kIndexHeads, 128}),
                                .weights = winnow::tensor(weights.data(), {1, kIndexHeads})},
                    .q = winnow::tensor(q.data(), {1, kHeads, 576}),
                    .scale = 0.1352f,
                    .out = winnow::tensor(out.data(), {1, own, 512}),
                    .workspace = workspace});
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    winnow::MpiCommunicator comm(MPI_COMM_WORLD, std::chrono::seconds(20));
    const auto mine =
        decode({.comm = &comm, .spread = winnow::Spread::kContext, .interleave = kPage});
    std::vector<winnow::bf16> all(mine.size() * comm.size());
    comm.all_gather(mine.data(), all.data(), mine.size() * sizeof(winnow::bf16), winnow::cpu());
    if (comm.rank() == 0) {
      const auto one = decode({});
      float worst = 0;
      for (size_t i = 0; i < one.size(); ++i)
        worst = std::max(worst, std::abs(float_of(all[i]) - float_of(one[i])));
      std::printf("%d ranks, %d tokens of context: largest difference to one rank %.2g\n",
                  comm.size(), kContext, static_cast<double>(worst));
      if (!(worst < 1e-3f)) status = 1;
    }
  } catch (const winnow::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    status = 1;
  }
  // After an error other ranks may be gone, and MPI_Finalize() would wait for them.
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return status;
}
