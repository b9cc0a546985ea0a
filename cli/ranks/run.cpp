// winnow run --ranks: the step loop of `winnow run` with one layer over ranks.
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "core/formats.h"
#include "ranks/layer.h"
#include "ranks/ranks.h"
#include "requests.h"

namespace winnow::cli {

namespace {

// A rank's outputs beside those of one rank that has everything.
struct Compared {
  int64_t values = 0, equal = 0;
  double worst = 0;  // as a share of the bound
};

// Both sides round weights to bf16 at most, 2^-8 of the largest value (3.5 sigma), and the output.
Compared compare(const RankLayer& own, const RankLayer& whole, int32_t heads) {
  constexpr float kLargest = 3.5f * tools::kLatentSigma;
  Compared c;
  const int64_t width = own.out_heads() * 512;
  for (size_t i = 0; i < own.own_tokens().size(); ++i) {
    const bf16* const got = own.out().data() + static_cast<int64_t>(i) * width;
    const bf16* const want =
        whole.out().data() + (own.own_tokens()[i] * int64_t{heads} + own.first_head()) * 512;
    for (int64_t j = 0; j < width; ++j) {
      const float a = internal::core::to_float(got[j]), b = internal::core::to_float(want[j]);
      c.equal += got[j].bits == want[j].bits;
      const float bound = 0x1p-7f * kLargest + 0x1p-7f * std::abs(b);
      c.worst = std::max(c.worst, static_cast<double>(std::abs(a - b) / bound));
    }
    c.values += width;
  }
  return c;
}

}  // namespace

Spread spread_of(const std::string& name) {
  if (name == "heads") return Spread::kHeads;
  if (name == "context") return Spread::kContext;
  if (name == "queries" || name == "sharded") return Spread::kQueries;
  throw Error(ErrorCode::kInvalidArgument,
              "--spread: expected heads, context, queries or sharded, found '" + name + "'");
}

int run_ranks(const Words& words, Communicator& base) {
  CountedRanks comm(base);
  const auto int32 = [&](const char* name, int64_t otherwise) {
    return static_cast<int32_t>(words.number(name, otherwise));
  };
  const std::string spread = words.text("spread", "context");
  RankLayerOptions o{.parallel = {.comm = &comm,
                                  .spread = spread_of(spread),
                                  .interleave = int32("interleave", 64),
                                  .sharded = spread == "sharded"},
                     .heads = int32("heads", 16),
                     .index_heads = int32("index-heads", 32),
                     .topk = int32("topk", 2048),
                     .page = int32("page", 64),
                     .max_requests = int32("requests", 8),
                     .max_tokens = int32("step-tokens", 64),
                     .max_context = int32("context", 8192),
                     .kernel = words.text("kernel", "")};
  if (o.heads % comm.size() != 0)
    throw Error(ErrorCode::kInvalidArgument,
                "winnow-ranks: heads: expected a multiple of the ranks");
  const Limits limits{.requests = o.max_requests,
                      .context = o.max_context,
                      .step_tokens = o.max_tokens,
                      .page = o.page};
  const auto seed = static_cast<uint64_t>(words.number("seed", 1));
  Requests requests(limits, seed);  // the same on every rank
  o.pages = requests.pages();
  RankLayer layer(o);
  RankLayerOptions alone = o;
  alone.parallel = {};
  RankLayer whole(alone);  // one rank with everything: what the others are compared with

  const int64_t steps = words.number("steps", 48);
  int64_t tokens = 0;
  double slowest = 0, mine = 0, single = 0;
  Compared c;
  std::vector<double> all(static_cast<size_t>(comm.size()));
  uint64_t arrival = seed << 32;
  for (int64_t s = 0; s < steps; ++s) {
    const Step& step = requests.next();
    for (const Request* r : step.arrived) {
      layer.write_prefix(r->pages, r->length, ++arrival);
      whole.write_prefix(r->pages, r->length, arrival);
    }
    std::vector<Sequence> batch;
    batch.reserve(step.requests.size());
    for (size_t r = 0; r < step.requests.size(); ++r)
      batch.push_back({step.requests[r]->pages, step.query_starts[r + 1] - step.query_starts[r],
                       step.seq_lens[r]});
    layer.prepare(batch, seed + static_cast<uint64_t>(s));
    whole.prepare(batch, seed + static_cast<uint64_t>(s));
    comm.exchange(&mine, all.data(), sizeof mine);  // all begin together
    const double began = seconds_now();
    layer.run();
    mine = seconds_now() - began;
    comm.exchange(&mine, all.data(), sizeof mine);
    slowest += *std::max_element(all.begin(), all.end());
    const double began_alone = seconds_now();
    whole.run();  // keeps its caches up, too
    single += seconds_now() - began_alone;
    const Compared now = compare(layer, whole, o.heads);
    c.values += now.values;
    c.equal += now.equal;
    c.worst = std::max(c.worst, now.worst);
    tokens += step.tokens();
    requests.done();
  }
  struct Sums {
    double worst, bytes, calls, seconds, equal, values;
  };
  const Sums own{c.worst,      static_cast<double>(comm.bytes), static_cast<double>(comm.calls),
                 comm.seconds, static_cast<double>(c.equal),    static_cast<double>(c.values)};
  std::vector<Sums> sums(static_cast<size_t>(comm.size()));
  comm.exchange(&own, sums.data(), sizeof own);
  Sums total{};
  for (const Sums& x : sums) {
    total.worst = std::max(total.worst, x.worst);
    total.equal += x.equal;
    total.values += x.values;
  }
  const bool exact = o.parallel.spread == Spread::kQueries;
  const bool ok = total.worst <= 1 && (!exact || total.equal == total.values);
  if (comm.rank() != 0) return ok ? 0 : 1;
  const auto count = static_cast<double>(steps);
  std::printf(
      "{\"spread\": \"%s\", \"transport\": \"%s\", \"ranks\": %d, \"heads\": %d, "
      "\"interleave\": %d, \"steps\": %lld, \"tokens\": %lld, \"ms_per_step\": %.4f, "
      "\"one_rank_ms_per_step\": %.4f, \"collectives_ms_per_step\": %.4f, "
      "\"collectives_per_step\": %.2f, \"bytes_in_per_step\": %.0f, "
      "\"equal_to_one_rank\": %.6f, \"worst_of_bound\": %.4f, \"ok\": %s}\n",
      spread.c_str(), comm.name(), comm.size(), o.heads, o.parallel.interleave,
      static_cast<long long>(steps), static_cast<long long>(tokens), 1e3 * slowest / count,
      1e3 * single / count, 1e3 * own.seconds / count, own.calls / count, own.bytes / count,
      total.equal / std::max(total.values, 1.0), total.worst, ok ? "true" : "false");
  return ok ? 0 : 1;
}

}  // namespace winnow::cli
