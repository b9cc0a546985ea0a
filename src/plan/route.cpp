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

// H200, 2026-11-15, 8e4f87b. With 16 heads gathering saves 8 % at most, of 1,024 tokens and more,
// which is not worth its workspace.
constexpr Crossover kHopper128[] = {
    {256, 193, 85},      {1024, 171, 209},     {2048, 163, 242},     {4096, 156, 1022},
    {8192, 166, kNever}, {16384, 188, kNever}, {65536, 471, kNever},
};
constexpr Crossover kHopper64[] = {
    {256, kNever, 119},  {1024, 181, 210},     {2048, 165, 247},     {4096, 157, 980},
    {8192, 177, kNever}, {16384, 229, kNever}, {65536, 929, kNever},
};
constexpr Crossover kHopper32[] = {
    {256, kNever, 187}, {1024, 280, 171},     {2048, 204, 172},        {4096, 177, 431},
    {8192, 246, 1156},  {16384, 516, kNever}, {65536, kNever, kNever},
};
constexpr Crossover kHopper16[] = {
    {256, kNever, kNever}, {1024, kNever, 157},   {2048, kNever, 144},     {4096, kNever, 304},
    {8192, kNever, 643},   {16384, kNever, 1689}, {65536, kNever, kNever},
};
// V4: 128 heads with 1,024 compressed states, 64 with 512.
constexpr Crossover kHopperV4Heads128[] = {
    {4096, 106, kNever}, {16384, 109, kNever}, {65536, 156, kNever}};
constexpr Crossover kHopperV4Heads64[] = {
    {4096, 168, kNever}, {16384, 184, kNever}, {65536, 385, kNever}};
// AMD EPYC (Zen 4), 2 cores that others used too, 2026-11-15, c71596d, 16 heads, --cache warm:
// reading the pages was never slower than gathering them. With AMX attend() is several times as
// fast, and attend_mha() is not.
constexpr Crossover kCpu[] = {{256, kNever, 185}, {1024, kNever, 458}, {65536, kNever, kNever}};

// The table measured with the number of heads that is nearest, in factors of two.
std::span<const Crossover> table_for(const RouteArgs& args) noexcept {
  if (args.device == DeviceKind::kCpu) return kCpu;
  if (args.model.lists == 2)
    return args.heads > 90 ? std::span<const Crossover>(kHopperV4Heads128) : kHopperV4Heads64;
  if (args.heads > 90) return kHopper128;
  if (args.heads > 45) return kHopper64;
  return args.heads >= planning::kManyHeads ? std::span<const Crossover>(kHopper32) : kHopper16;
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
