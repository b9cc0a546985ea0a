// Which way a prefill goes: crossover points read off measurements.
//
// A row of a table holds for contexts up to its own. `gathered` and `mha` are the new tokens from
// which that way is faster than the ones before it, interpolated between the two measured sizes
// around the crossing; beyond the last row the cost of gathering grows with the context and is what
// decides. Measured with `winnow bench plan --set routes --cache cold` (route_bench.cpp says what
// is counted), top-k 2,048, one request of 16, 64, 256, 1,024 or 4,096 new tokens; the times stand
// in docs/prefill-sm90.md.
#include <algorithm>
#include <cstdint>
#include <span>

#include "cpu/isa.h"
#include "plan/choice.h"
#include "winnow/plan.h"

namespace winnow {

namespace {

constexpr int32_t kNever = INT32_MAX;

struct Crossover {
  int32_t context, gathered, mha;
};

// H200, 2026-11-15, 50c797f: 128 heads and 16. With few heads gathering wins nothing: below 1 % at
// best, for 4,096 tokens.
constexpr Crossover kHopperManyHeads[] = {
    {256, 196, 92},      {1024, 162, 210},     {2048, 155, 241},     {4096, 149, 979},
    {8192, 157, kNever}, {16384, 177, kNever}, {65536, 342, kNever},
};
constexpr Crossover kHopperFewHeads[] = {
    {256, kNever, kNever}, {1024, kNever, 184},   {2048, kNever, 172},     {4096, kNever, 332},
    {8192, kNever, 692},   {16384, kNever, 1724}, {65536, kNever, kNever},
};
// V4: 128 heads with 1,024 compressed states, the same run; 64 with 512, 3038f8f without the faster
// decode kernel of 6ceb7ad.
constexpr Crossover kHopperV4ManyHeads[] = {
    {4096, 98, kNever}, {16384, 101, kNever}, {65536, 146, kNever}};
constexpr Crossover kHopperV4FewHeads[] = {
    {4096, 162, kNever}, {16384, 170, kNever}, {65536, 308, kNever}};
// AMD EPYC (Zen 4), 2 cores that others used too, 2026-11-15, c71596d, 16 heads, --cache warm:
// reading the pages was never slower than gathering them. With AMX attend() is several times as
// fast, and attend_mha() is not.
constexpr Crossover kCpu[] = {{256, kNever, 185}, {1024, kNever, 458}, {65536, kNever, kNever}};

// The table measured with the number of heads that is nearest, in factors of two: between them
// nothing was measured.
std::span<const Crossover> table_for(const RouteArgs& args) noexcept {
  if (args.device == DeviceKind::kCpu) return kCpu;
  if (args.model.lists == 2)
    return args.heads > 90 ? std::span<const Crossover>(kHopperV4ManyHeads) : kHopperV4FewHeads;
  return args.heads >= planning::kManyHeads ? std::span<const Crossover>(kHopperManyHeads)
                                            : kHopperFewHeads;
}

bool reached(int32_t tokens, int32_t from) { return from != kNever && tokens >= from; }

}  // namespace

Route prefill_route(const RouteArgs& args) noexcept {
  const bool cpu = args.device == DeviceKind::kCpu;
  if (cpu && (host::isa().amx_bf16 || args.model.lists == 2)) return Route::kDirect;
  const std::span<const Crossover> table = table_for(args);
  const auto row =
      std::ranges::find_if(table, [&](const Crossover& c) { return args.context <= c.context; });
  if (row != table.end()) {
    if (args.mha && reached(args.tokens, row->mha)) return Route::kMha;
    return reached(args.tokens, row->gathered) ? Route::kGathered : Route::kDirect;
  }
  const Crossover& last = table.back();
  const double from = static_cast<double>(last.gathered) * args.context / last.context;
  return last.gathered != kNever && args.tokens >= from ? Route::kGathered : Route::kDirect;
}

}  // namespace winnow
