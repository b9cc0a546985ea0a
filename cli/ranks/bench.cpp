// winnow bench parallel: a layer over MPI ranks, timed, beside what a model predicts for it.
//
// The prediction is the ranks' own work, timed side by side without a collective (ranks of one
// machine share its memory), and the time of each collective by a table that was measured before
// (Open MPI 4.1.6, 16 cores of a Xeon in one machine; MPI_Iallgather and MPI_Ialltoall with
// MPI_Test, as winnow/mpi.h calls them).
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>

#include "ranks/layer.h"
#include "ranks/ranks.h"

namespace winnow::cli {

namespace {

struct Case {
  const char *name, *spread;
  int32_t requests, tokens, context;  // new tokens of each request; its length with them
  int32_t interleave = 64;
};
constexpr int32_t k1024 = 1024;
constexpr Case kCases[] = {
    {"context_1x32k", "context", 1, 1, 32 * k1024},
    {"context_1x128k", "context", 1, 1, 128 * k1024},
    {"context_1x1m", "context", 1, 1, 1024 * k1024},
    {"context_8x32k", "context", 8, 1, 32 * k1024},
    {"heads_1x128k", "heads", 1, 1, 128 * k1024},
    {"heads_16x16k", "heads", 16, 1, 16 * k1024},
    {"queries_512_of_16k", "queries", 1, 512, 16 * k1024, 8},
    {"sharded_512_of_16k", "sharded", 1, 512, 16 * k1024, 8},
};
constexpr int32_t kHeads = 128, kIndexHeads = 64, kTopk = 2048, kPage = 64;

// Microseconds of a collective by ranks (2, 4, 8, 16) and bytes: of a rank's block for all_gather,
// of all blocks that a rank sends for all_to_all.
constexpr std::array<double, 5> kBytes = {64, 16384, 131072, 1048576, 8388608};
constexpr double kAllGather[4][5] = {{1.3, 7.5, 33.3, 331.5, 2765.2},
                                     {2.8, 21.6, 92.9, 848.9, 7838.8},
                                     {5.9, 46.1, 323.0, 1962.1, 19008.1},
                                     {11.5, 107.8, 714.5, 6732.5, 50791.9}};
constexpr double kAllToAll[4][5] = {{1.3, 5.7, 20.5, 158.6, 1371.2},
                                    {2.6, 12.2, 29.2, 229.6, 1885.1},
                                    {5.6, 13.9, 45.1, 269.8, 2150.7},
                                    {10.0, 24.0, 75.3, 442.4, 2960.1}};

double of_table(const double (&table)[4][5], int32_t ranks, double bytes) {
  const int row = std::clamp(static_cast<int>(std::ceil(std::log2(ranks))) - 1, 0, 3);
  const double x = std::max(bytes, kBytes.front());
  size_t i = 1;
  while (i + 1 < kBytes.size() && x > kBytes[i]) ++i;
  const double f = std::log(x / kBytes[i - 1]) / std::log(kBytes[i] / kBytes[i - 1]);
  return table[row][i - 1] * std::pow(table[row][i] / table[row][i - 1], f);
}

// A rank's own work without waiting for anyone: what the others sent in a first run is kept and
// given again in those that follow. The table says how long each collective would have taken.
class Replay final : public Communicator {
 public:
  explicit Replay(Communicator& comm) : comm_(comm) {}
  int32_t rank() const noexcept override { return comm_.rank(); }
  int32_t size() const noexcept override { return comm_.size(); }
  const char* name() const noexcept override { return comm_.name(); }
  bool takes(DeviceKind kind) const noexcept override { return comm_.takes(kind); }
  void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override {
    predicted_us += of_table(kAllGather, size(), static_cast<double>(bytes));
    replay(recv, bytes, [&] { comm_.all_gather(send, recv, bytes, device); });
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override {
    predicted_us += of_table(kAllToAll, size(), static_cast<double>(bytes) * size());
    replay(recv, bytes, [&] { comm_.all_to_all(send, recv, bytes, device); });
  }
  void exchange(const void* send, void* recv, size_t bytes) override {
    comm_.exchange(send, recv, bytes);
  }
  void check() override { comm_.check(); }

  // Before each run of a layer: the same calls follow.
  void begin() {
    recorded_ = !received_.empty();
    next_ = 0;
    predicted_us = copied_seconds = 0;
  }

  double predicted_us = 0, copied_seconds = 0;

 private:
  template <class F>
  void replay(void* recv, size_t bytes, const F& call) {
    const double began = seconds_now();
    const size_t all = bytes * static_cast<size_t>(size());
    if (recorded_) {
      std::memcpy(recv, received_[next_++].data(), all);
    } else {
      call();
      const auto* const from = static_cast<const std::byte*>(recv);
      received_.emplace_back(from, from + all);
    }
    copied_seconds += seconds_now() - began;
  }
  Communicator& comm_;
  std::vector<std::vector<std::byte>> received_;
  size_t next_ = 0;
  bool recorded_ = false;
};

RankLayerOptions options_of(const Case& c, Communicator* comm, const std::string& kernel) {
  const bool sharded = std::strcmp(c.spread, "sharded") == 0;
  RankLayerOptions o{.parallel = {.comm = comm,
                                  .spread = spread_of(c.spread),
                                  .interleave = c.interleave,
                                  .sharded = sharded},
                     .heads = kHeads,
                     .index_heads = kIndexHeads,
                     .topk = kTopk,
                     .page = kPage,
                     .max_requests = c.requests,
                     .max_tokens = c.requests * c.tokens,
                     .max_context = c.context,
                     .kernel = kernel};
  const bool split = sharded || o.parallel.spread == Spread::kContext;
  const int64_t held =
      split ? Shard{comm->size(), 0, c.interleave}.local_length(c.context) : c.context;
  o.pages = c.requests * ((held + kPage - 1) / kPage);
  return o;
}

// A layer with the case's batch.
struct Prepared {
  RankLayer layer;
  std::vector<int32_t> pages;
  Prepared(const Case& c, const RankLayerOptions& o) : layer(o), pages(o.pages) {
    std::iota(pages.begin(), pages.end(), 0);
    layer.fill_caches(7);
    const auto each = pages.size() / static_cast<size_t>(c.requests);
    std::vector<Sequence> batch;
    batch.reserve(static_cast<size_t>(c.requests));
    for (int32_t r = 0; r < c.requests; ++r)
      batch.push_back(
          {std::span(pages).subspan(static_cast<size_t>(r) * each, each), c.tokens, c.context});
    layer.prepare(batch, 11);
  }
};

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

int runs_for(double seconds, double limit) {
  return std::clamp(static_cast<int>(limit / std::max(seconds, 1e-6)), 2, 200);
}

// The slowest rank's time of `body`, which all ranks begin together; the median of several.
template <class F>
double slowest_us(Communicator& comm, double limit, int& runs, const F& body) {
  std::vector<double> all(static_cast<size_t>(comm.size()));
  double mine = 0;
  const auto one = [&] {
    comm.exchange(&mine, all.data(), sizeof mine);
    mine = body();
    comm.exchange(&mine, all.data(), sizeof mine);
    return *std::max_element(all.begin(), all.end());
  };
  const double first = one();  // of the slowest rank: every rank makes as many runs
  runs = runs_for(first > limit ? first : one(), limit);
  std::vector<double> times;
  times.reserve(static_cast<size_t>(runs));
  for (int i = 0; i < runs; ++i) times.push_back(one());
  return 1e6 * median(times);
}

struct Predicted {
  double local_us = 0, collectives_us = 0;
};
Predicted predict(const Case& c, Communicator& comm, const std::string& kernel, double limit) {
  Replay replay(comm);
  Prepared p(c, options_of(c, &replay, kernel));
  int runs = 0;
  const double us = slowest_us(comm, limit, runs, [&] {
    replay.begin();
    const double began = seconds_now();
    p.layer.run();
    return seconds_now() - began - replay.copied_seconds;
  });
  return {us, replay.predicted_us};
}

}  // namespace

int bench_ranks(const Words& words, Communicator& base) {
  CountedRanks comm(base);
  const std::string kernel = words.text("kernel", ""), filter = words.text("filter", "");
  const double limit = static_cast<double>(words.number("milliseconds", 400)) * 1e-3;
  for (const Case& c : kCases) {
    if (std::string(c.name).find(filter) == std::string::npos) continue;
    // One rank waits for nobody: there is nothing to predict.
    Predicted predicted;
    if (comm.size() > 1) predicted = predict(c, comm, kernel, limit);

    Prepared p(c, options_of(c, &comm, kernel));
    int runs = 0;
    double collectives = 0;
    const double measured = slowest_us(comm, limit, runs, [&] {
      comm.bytes = comm.calls = 0;
      comm.seconds = 0;
      const double began = seconds_now();
      p.layer.run();
      collectives = comm.seconds;
      return seconds_now() - began;
    });
    if (comm.rank() != 0) continue;
    if (comm.size() == 1) predicted.local_us = measured;
    std::printf(
        "{\"case\": \"%s\", \"spread\": \"%s\", \"ranks\": %d, \"requests\": %d, "
        "\"tokens\": %d, \"context\": %d, \"heads\": %d, \"interleave\": %d, "
        "\"runs\": %d, \"measured_us\": %.1f, \"predicted_us\": %.1f, "
        "\"local_us\": %.1f, \"predicted_collectives_us\": %.1f, "
        "\"collectives_us\": %.1f, \"collectives\": %lld, \"bytes_in\": %lld, "
        "\"score\": \"%s\", \"attend\": \"%s\"}\n",
        c.name, c.spread, comm.size(), c.requests, c.requests * c.tokens, c.context, kHeads,
        c.interleave, runs, measured, predicted.local_us + predicted.collectives_us,
        predicted.local_us, predicted.collectives_us, 1e6 * collectives,
        static_cast<long long>(comm.calls), static_cast<long long>(comm.bytes),
        p.layer.plan().kernel(Stage::kScore), p.layer.plan().kernel(Stage::kAttend));
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace winnow::cli
