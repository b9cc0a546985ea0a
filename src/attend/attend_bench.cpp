// attend: decode over selected records. One token and 16, every head count of a tensor-parallel
// shard. FLOP: 2 H K (d_qk + d_v) a token; bytes: each selected record once. The set "flashmla" has
// the shapes that FlashMLA's figures (bench/peers) were taken with.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "harness.h"
#include "lone_rank.h"
#include "problems.h"
#include "winnow/error.h"
#include "winnow/plan.h"

namespace winnow::attend_bench {
namespace {

// The tokens of a batch read the same pages: 16 of them would otherwise need 16 caches of 32k.
bench::Sizes decode(const Model& model, int64_t heads, int64_t topk, int64_t extra) {
  return {.model = model, .heads = heads, .topk = topk, .extra = extra, .shared = true};
}

constexpr int64_t kPrefill = 1024;  // tokens of a request from which a case is a prefill

std::string name_of_case(const bench::Sizes& s) {
  std::string name = fmt::format("{} h{} topk {}", s.model.name, s.heads, s.topk);
  if (s.extra > 0) name += fmt::format("+{}", s.extra);
  if (s.s_q >= kPrefill) return fmt::format("prefill {} {} x {}k", name, s.s_q, s.context / 1024);
  if (s.s_q > 1) return fmt::format("{} b{} s_q {}", name, s.batch, s.s_q);
  return name + fmt::format(" {} token{}", s.batch, s.batch == 1 ? "" : "s");
}

bench::Case case_of(const bench::Sizes& s, const std::string& name) {
  bench::Case c{.name = name, .model = std::string(s.model.name)};
  c.heads = s.heads;
  c.topk = s.topk;
  c.extra = s.extra;
  c.batch = s.batch;
  c.s_q = s.s_q;
  c.context = s.context;
  return c;
}

// `gathered`: the bf16 rows are first made from paged fp8 ones. `note` is added to the case's name;
// what has one is not held against a peer's figure.
void measure(bench::Runner& runner, bench::Sizes sizes, const char* note = "",
             bool gathered = false, Precision precision = Precision::kFull) {
  sizes.device = runner.device();
  bench::Case c = case_of(sizes, name_of_case(sizes) + note);
  if (*note) c.topk = 0;  // which every figure of a peer names
  if (!runner.wants(c)) return;
  bench::AttendProblem problem(sizes);
  problem.args.precision = precision;
  // As the peers' calls: a decode returns output and lse, a prefill the maximum as well.
  if (sizes.s_q < kPrefill) problem.args.max_logit = {};
  c.flops = problem.flops();
  c.bytes = problem.bytes();
  std::optional<bench::GatherProblem> before;
  if (gathered) {
    sizes.bf16_cache = false;
    sizes.page = 64;
    before.emplace(sizes, problem.cache.cache.data);
  }
  for (const std::string& kernel : runner.kernels()) {
    c.kernel = kernel;
    try {
      problem.use(kernel.c_str());
    } catch (const Error& e) {  // this kernel does not read these rows
      if (e.code() != ErrorCode::kUnsupported) throw;
      continue;
    }
    runner.measure(c, [&] {
      if (before) gather(before->args);
      attend(problem.args);
    });
  }
}

const bench::Suite suite("attend", "default", [](bench::Runner& runner) {
  for (const int64_t tokens : {1, 16}) {
    const auto run = [&](bench::Sizes sizes, const char* note = "") {
      sizes.batch = tokens;
      measure(runner, sizes, note);
    };
    for (const int64_t topk : {2048, 512})
      for (const int64_t heads : {128, 64, 32, 16, 8}) run(decode(kV32, heads, topk, 0));
    for (const int64_t extra : {512, 1024})
      for (const int64_t heads : {128, 64}) run(decode(kV4, heads, 128, extra));
    for (const int64_t heads : {128, 64}) {
      bench::Sizes powers = decode(kV32, heads, 2048, 0);
      powers.scale = ScaleMode::kPow2;
      run(powers, ", pow2 scales");
    }
  }
});

const bench::Suite flashmla("attend", "flashmla", [](bench::Runner& runner) {
  // Random slots of caches of 16k tokens, one for each request.
  const auto run = [&](bench::Sizes s) {
    s.shuffled = true;
    measure(runner, s);
  };
  const auto decode = [&](int64_t heads, int64_t batch, int64_t s_q) {
    run({.heads = heads, .topk = 2048, .batch = batch, .s_q = s_q, .context = 16384});
  };
  for (const int64_t heads : {128, 64, 32, 16, 12, 8}) {
    for (const int64_t batch : {1, 2, 8, 32, 64, 128}) decode(heads, batch, 1);
    decode(heads, 128, 2);
  }
  run({.heads = 128, .topk = 16384, .batch = 148, .s_q = 2, .context = 32768});
  for (const int64_t batch : {2, 32, 128}) {
    const auto v4 = [&](int64_t heads, int64_t extra) {
      run({.model = kV4,
           .heads = heads,
           .topk = 128,
           .extra = extra,
           .batch = batch,
           .s_q = 2,
           .context = 16384});
    };
    v4(64, 512), v4(128, 1024);
  }
  // Prefill from contiguous bf16 rows: a cache of one page.
  const auto rows = [](const Model& model, int64_t heads, int64_t topk, int64_t context) {
    return bench::Sizes{.model = model,
                        .heads = heads,
                        .topk = topk,
                        .s_q = 4096,
                        .context = context,
                        .page = static_cast<int32_t>(context),
                        .bf16_cache = true,
                        .shuffled = true};
  };
  const auto prefill = [&](const Model& model, int64_t heads, int64_t topk, int64_t context) {
    measure(runner, rows(model, heads, topk, context));
  };
  for (const int64_t context : {8192, 65536, 131072}) prefill(kV32, 128, 2048, context);
  prefill(kV32, 64, 2048, 65536);
  prefill(kV4, 64, 512, 32768), prefill(kV4, 128, 1024, 32768);
  for (const int64_t heads : {32, 16}) prefill(kV32, heads, 2048, 65536);
  // Neighbouring tokens that share keys.
  for (const int32_t overlap : {80, 95}) {
    bench::Sizes s = rows(kV32, 128, 2048, 65536);
    s.overlap = overlap;
    measure(runner, s, overlap == 80 ? ", 80 % shared" : ", 95 % shared");
  }
  // From fp8 pages: directly, and by gathering them into bf16 rows first.
  const auto from_pages = [&](const bench::Sizes& s) {
    bench::Sizes direct = s;
    direct.page = 64;
    direct.bf16_cache = false;
    measure(runner, direct, ", fp8 pages");
    measure(runner, s, ", fp8 pages gathered", true);
  };
  for (const int64_t heads : {128, 64}) from_pages(rows(kV32, heads, 2048, 65536));
  from_pages(rows(kV4, 64, 512, 32768)), from_pages(rows(kV4, 128, 1024, 32768));
});

// Products of e4m3 beside those of 16 bits: decode, and prefill from fp8 pages.
const bench::Suite fp8("attend", "fp8", [](bench::Runner& runner) {
  const auto run = [&](bench::Sizes s) {
    s.shuffled = true;
    const bool prefill = s.s_q >= kPrefill;
    measure(runner, s, prefill ? ", fp8 pages" : "");
    measure(runner, s, prefill ? ", fp8 pages, e4m3 products" : ", e4m3 products", false,
            Precision::kFp8);
  };
  for (const int64_t heads : {128, 64}) {
    for (const int64_t batch : {1, 8, 32, 64, 100, 128})
      run({.heads = heads, .topk = 2048, .batch = batch, .context = 16384});
    run({.heads = heads, .topk = 2048, .batch = 128, .s_q = 2, .context = 16384});
    run({.heads = heads, .topk = 2048, .s_q = 4096, .context = 65536});
  }
});

// Decode at any batch: what a batch costs that does not fill the machine's multiprocessors evenly.
const bench::Suite batches("attend", "batches", [](bench::Runner& runner) {
  const auto run = [&](bench::Sizes s) {
    s.context = 16384;
    s.shuffled = true;
    for (const int64_t batch :
         {1,  2,  3,  4,  6,  8,  12,  16,  20,  24,  28,  32,  40,  48,  56,
          64, 66, 68, 72, 80, 96, 112, 128, 132, 136, 144, 160, 192, 224, 256})
      s.batch = batch, measure(runner, s);
  };
  for (const int64_t heads : {128, 64, 16}) run({.heads = heads, .topk = 2048});
  for (const int64_t heads : {128, 64})
    run({.model = kV4, .heads = heads, .topk = 128, .extra = heads * 8});
  // Short contexts: lists that end in -1.
  const auto padded = [&](int64_t heads, int64_t batch) {
    measure(runner, {.heads = heads, .topk = 2048, .batch = batch, .context = 500},
            ", 500 of 2048 valid");
  };
  padded(128, 64), padded(16, 128);
  for (const int64_t heads : {128, 16})
    measure(runner,
            {.heads = heads,
             .topk = 2048,
             .batch = 64,
             .context = 16384,
             .shuffled = true,
             .holes = true},
            ", every second -1");
  // The block table read by the kernel, to hold against the same with slots.
  const auto logical = [&](bench::Sizes s) {
    s.context = 16384;
    s.shuffled = s.logical = true;
    for (const int64_t batch : {8, 64, 128, 256})
      s.batch = batch, measure(runner, s, ", logical ids");
  };
  for (const int64_t heads : {128, 16}) logical({.heads = heads, .topk = 2048});
  logical({.model = kV4, .heads = 64, .topk = 128, .extra = 512});
});

// A rank of eight that share out the context: all heads over its part of the lists, into fp32 in
// blocks of heads. Lists are as wide as the whole top-k and about an eighth as long. Beside it,
// lists that are as wide as long.
void measure_shard(bench::Runner& runner, int64_t tokens) {
  constexpr int32_t kRanks = 8;
  const bench::Sizes sizes{.heads = 128,
                           .topk = 2048,
                           .batch = tokens,
                           .context = 16384,
                           .shuffled = true,
                           .device = runner.device()};
  const int64_t own = sizes.heads / kRanks, length = sizes.topk / kRanks;
  bench::Case c = case_of(sizes, name_of_case(sizes) + ", a shard of 8");
  if (!runner.wants(c)) return;
  bench::AttendProblem problem(sizes);
  tools::LoneRank comm(kRanks);
  Plan plan({.heads = static_cast<int32_t>(sizes.heads),
             .pages = problem.cache.cache.pages,
             .max_requests = static_cast<int32_t>(tokens),
             .max_tokens = static_cast<int32_t>(tokens),
             .max_context = static_cast<int32_t>(sizes.context * kRanks),
             .target = {.device = runner.device()},
             .parallel = {.comm = &comm, .spread = Spread::kContext}});
  std::vector<int32_t> starts(tokens + 1);
  std::iota(starts.begin(), starts.end(), 0);
  plan.refill({starts, std::vector<int32_t>(tokens, static_cast<int32_t>(sizes.context * kRanks))});
  tools::Buffer<int32_t> lengths(tokens);
  std::ranges::fill(lengths, static_cast<int32_t>(length));
  tools::Buffer<float> out, lse;
  AttendArgs& args = problem.args;
  args.plan = &plan;
  args.max_logit = {};
  args.empty_lse_negative = true;
  args.lists[0].lengths = problem.placement.copied(lengths, {tokens});
  args.out = problem.placement.room(out, {kRanks, tokens, own, sizes.model.d_v});
  args.lse = problem.placement.room(lse, {kRanks, tokens, own});
  args.workspace = problem.placement.workspace(problem.workspace, plan.workspace_bytes());
  c.kernel = "sm90/decode";
  runner.measure(c, [&] { attend(args); });
}

const bench::Suite ranks("attend", "ranks", [](bench::Runner& runner) {
  if (!runner.on_cuda()) return;
  for (const int64_t tokens : {1, 8, 32, 128}) {
    for (const int64_t topk : {2048, 256})
      measure(runner,
              {.heads = 128, .topk = topk, .batch = tokens, .context = 16384, .shuffled = true});
    measure_shard(runner, tokens);
  }
});

}  // namespace
}  // namespace winnow::attend_bench
