// Two steps of a V3.2 layer over the ranks of an MPI job:
//   mpirun -n 4 example_parallel
// Each rank holds every fourth run of 8 positions of one request. A chunk of its prompt is
// prefilled first: every rank computes the tokens whose positions it holds (Spread::kQueries). Then
// one token is decoded: every rank attends to its members of the top-k with all heads, and gets the
// output of its own heads (Spread::kContext). Rank 0 compares both with one rank's.
#include <winnow/mpi.h>
#include <winnow/winnow.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace {

constexpr int32_t kHeads = 16, kIndexHeads = 4, kTopk = 256, kPage = 64, kContext = 2000;
// Tokens of the prefill's chunk; in front of them lies what was prefilled before.
constexpr int32_t kChunk = 48, kOld = kContext - 1 - kChunk;
// Consecutive positions on one rank: short runs share out a short chunk evenly.
constexpr int32_t kRun = 8;

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

// The request's caches on this rank, and its inputs, which every rank computes alike.
class Layer {
 public:
  explicit Layer(const winnow::Shard& shard)
      : shard_(shard), pages_(shard.local_length(kContext) / kPage + 1), table_(pages_) {
    for (int64_t i = 0; i < pages_; ++i) table_[i] = static_cast<int32_t>(i);
    latent_.resize(pages_ * winnow::page_bytes(winnow::CacheFormat::kV32Fp8, kPage));
    keys_.resize(pages_ * winnow::page_bytes(winnow::CacheFormat::kIndexKeys, kPage));
    // What came before; the positions of other ranks are written by them.
    std::vector<int64_t> slots(kOld);
    for (int64_t p = 0; p < kOld; ++p) slots[p] = slot(p);
    std::vector<winnow::bf16> kv, k;
    for (int64_t p = 0; p < kOld; ++p) {
      append(kv, p, 576, 0.2f, 0);
      append(k, p, 128, 1.0f, 1);
    }
    winnow::write({.kv = winnow::tensor(kv.data(), {kOld, 576}),
                   .slots = winnow::tensor(slots.data(), {kOld}),
                   .cache = cache()});
    winnow::write({.kv = winnow::tensor(k.data(), {kOld, 128}),
                   .slots = winnow::tensor(slots.data(), {kOld}),
                   .cache = index()});
  }

  // `count` new tokens from position `first` on. Gives [tokens of this rank, its heads, 512].
  std::vector<winnow::bf16> step(const winnow::Parallel& parallel, int32_t first, int32_t count) {
    // The plan's constructor and refill() compare options, kernels and batch over the ranks.
    winnow::Plan plan({.heads = kHeads,
                       .topk = kTopk,
                       .index_heads = kIndexHeads,
                       .page = kPage,
                       .pages = pages_,
                       .max_requests = 1,
                       .max_tokens = kChunk,
                       .max_context = kContext,
                       .split = winnow::SplitPolicy::kFixed,
                       .parallel = parallel});
    const std::vector<int32_t> starts = {0, count}, lengths = {first + count};
    plan.refill({.query_starts = starts, .seq_lens = lengths});

    // The tokens that this rank computes: all of them, or with kQueries its share.
    const auto positions = plan.positions();
    const int64_t tokens = plan.tokens();
    std::vector<winnow::bf16> kv, k, q;
    std::vector<winnow::e4m3> index_q;
    for (const int32_t p : positions) {
      append(kv, p, 576, 0.2f, 0);
      append(k, p, 128, 1.0f, 1);
      append(q, p, kHeads * 576, 1.7f, 2);
      for (int64_t i = 0; i < kIndexHeads * 128; ++i)  // 1.0 and -1.0
        index_q.push_back({static_cast<uint8_t>(input(p, i, 3) < 0 ? 0xb8 : 0x38)});
    }
    std::vector<float> weights(tokens * kIndexHeads, 1.0f);
    // Slots of the whole batch: -1 for positions that another rank holds.
    std::vector<int64_t> slots(count);
    for (int64_t i = 0; i < count; ++i) slots[i] = slot(first + i);

    const bool by_context = parallel.spread == winnow::Spread::kContext;
    const int64_t heads = by_context ? kHeads / parallel.comm->size() : kHeads;
    std::vector<winnow::bf16> out(tokens * heads * 512);
    std::vector<std::byte> workspace(winnow::pipeline_workspace_bytes(plan));
    const winnow::Tensor table = winnow::tensor(table_.data(), {1, pages_});
    winnow::pipeline({.plan = &plan,
                      .kv = winnow::tensor(kv.data(), {tokens, 576}),
                      .slots = winnow::tensor(slots.data(), {count}),
                      .cache = cache(),
                      .block_table = table,
                      .indexer = {.k = winnow::tensor(k.data(), {tokens, 128}),
                                  .slots = winnow::tensor(slots.data(), {count}),
                                  .keys = index(),
                                  .block_table = table,
                                  .q = winnow::tensor(index_q.data(), {tokens, kIndexHeads, 128}),
                                  .weights = winnow::tensor(weights.data(), {tokens, kIndexHeads})},
                      .q = winnow::tensor(q.data(), {tokens, kHeads, 576}),
                      .scale = 0.1352f,
                      .out = winnow::tensor(out.data(), {tokens, heads, 512}),
                      .workspace = workspace});
    return out;
  }

 private:
  // Where a position stands on this rank; -1 for what others hold.
  int64_t slot(int64_t p) const { return shard_.owns(p) ? shard_.local(p) : -1; }
  winnow::Cache cache() { return {latent_.data(), winnow::CacheFormat::kV32Fp8, pages_, kPage}; }
  winnow::Cache index() { return {keys_.data(), winnow::CacheFormat::kIndexKeys, pages_, kPage}; }
  static float input(int64_t position, int64_t i, int64_t what) {
    return number((position * 4 + what) * 100000 + i);
  }
  static void append(std::vector<winnow::bf16>& to, int64_t position, int64_t width, float size,
                     int64_t what) {
    for (int64_t i = 0; i < width; ++i) to.push_back(bf16_of(size * input(position, i, what)));
  }

  winnow::Shard shard_;
  int64_t pages_;
  std::vector<int32_t> table_;
  std::vector<std::byte> latent_, keys_;
};

// Largest difference of what this rank computed of the prefill to one rank's.
float prefill(Layer& layer, Layer& whole, winnow::Communicator& comm) {
  const winnow::Parallel parallel{
      .comm = &comm, .spread = winnow::Spread::kQueries, .interleave = kRun, .sharded = true};
  const auto mine = layer.step(parallel, kOld, kChunk);
  const auto one = whole.step({}, kOld, kChunk);
  const std::vector<int32_t> starts = {0, kChunk}, lengths = {kOld + kChunk};
  const winnow::BatchShare share = winnow::shard_batch({starts, lengths}, parallel.shard());
  float worst = 0;
  constexpr int64_t kRow = kHeads * 512;
  for (size_t i = 0; i < mine.size(); ++i) {
    const int64_t row = share.tokens[i / kRow];
    worst = std::max(worst, std::abs(float_of(mine[i]) - float_of(one[row * kRow + i % kRow])));
  }
  return worst;
}

// The same of the decode.
float decode(Layer& layer, Layer& whole, winnow::Communicator& comm) {
  const auto mine = layer.step(
      {.comm = &comm, .spread = winnow::Spread::kContext, .interleave = kRun}, kContext - 1, 1);
  const auto one = whole.step({}, kContext - 1, 1);
  float worst = 0;
  for (size_t i = 0; i < mine.size(); ++i)
    worst =
        std::max(worst, std::abs(float_of(mine[i]) - float_of(one[comm.rank() * mine.size() + i])));
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int status = 0;
  try {
    winnow::MpiCommunicator comm(MPI_COMM_WORLD, std::chrono::seconds(20));
    Layer layer({comm.size(), comm.rank(), kRun}), whole(winnow::Shard{});
    const float own[2] = {prefill(layer, whole, comm), decode(layer, whole, comm)};
    std::vector<float> all(2 * static_cast<size_t>(comm.size()));
    comm.exchange(own, all.data(), sizeof own);
    float worst[2] = {0, 0};
    for (size_t i = 0; i < all.size(); ++i) worst[i % 2] = std::max(worst[i % 2], all[i]);
    if (comm.rank() == 0)
      std::printf(
          "%d ranks, %d tokens of context: largest difference to one rank %.2g in the "
          "prefill, %.2g in the decode\n",
          comm.size(), kContext, static_cast<double>(worst[0]), static_cast<double>(worst[1]));
    // The prefill has one rank's bits; the decode sums in another order.
    if (worst[0] != 0 || !(worst[1] < 1e-3f)) status = 1;
  } catch (const winnow::Error& e) {
    std::fprintf(stderr, "%s\n", e.what());
    status = 1;
  }
  // After an error other ranks may be gone, and MPI_Finalize() would wait for them.
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Finalize();
  return status;
}
