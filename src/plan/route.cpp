// Which way a prefill goes: crossover points read off measurements.
//
// `gathered` and `mha` of a row are the new tokens from which that way is faster than the ones
// before it, with the row's context; found between the two measured sizes around the crossing.
// Between two rows they are interpolated, or the longer context's where one of the two has none;
// beyond the last row the cost of gathering grows with the context and is what decides. Measured
// with `winnow bench plan --set routes --cache cold` (route_bench.cpp says what is counted), top-k
// 2,048, one request of 16, 64, 256, 1,024 or 4,096 new tokens; the times stand in
// docs/prefill-sm90.md.
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

// H200, 2026-11-16, cd59a2a. With 32 heads gathering saves 3 % at most, with 16 nothing: not worth
// its workspace.
constexpr Crossover kHopper128[] = {
    {256, 173, 53},     {1024, 74, 135},     {2048, 52, 175},      {4096, 48, 583},
    {8192, 52, kNever}, {16384, 60, kNever}, {65536, 206, kNever},
};
constexpr Crossover kHopper64[] = {
    {256, kNever, 62},   {1024, 172, 123},     {2048, 164, 172},     {4096, 148, 588},
    {8192, 152, kNever}, {16384, 179, kNever}, {65536, 456, kNever},
};
constexpr Crossover kHopper32[] = {
    {256, kNever, 72},   {1024, kNever, 122},     {2048, kNever, 143},     {4096, kNever, 328},
    {8192, kNever, 834}, {16384, kNever, kNever}, {65536, kNever, kNever},
};
constexpr Crossover kHopper16[] = {
    {256, kNever, 146},  {1024, kNever, 121},   {2048, kNever, 137},     {4096, kNever, 307},
    {8192, kNever, 600}, {16384, kNever, 1609}, {65536, kNever, kNever},
};
// V4: 128 heads with 1,024 compressed states, 64 with 512.
constexpr Crossover kHopperV4Heads128[] = {
    {4096, 38, kNever}, {16384, 41, kNever}, {65536, 58, kNever}};
constexpr Crossover kHopperV4Heads64[] = {
    {4096, 150, kNever}, {16384, 157, kNever}, {65536, 213, kNever}};
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
  if (args.heads >= internal::plan::kManyHeads) return kHopper64;
  return args.heads > 22 ? std::span<const Crossover>(kHopper32) : kHopper16;
}

// The new tokens from which this way is taken, between the row before and `row`.
int32_t least_tokens(std::span<const Crossover> table, const Crossover& row,
                     int32_t Crossover::*way, int32_t context) {
  const Crossover& before = &row == table.data() ? row : (&row)[-1];
  if (row.*way == kNever || before.*way == kNever || &before == &row) return row.*way;
  const double part =
      static_cast<double>(context - before.context) / (row.context - before.context);
  return before.*way + static_cast<int32_t>(part * (row.*way - before.*way));
}

bool reached(int32_t tokens, int32_t from) { return from != kNever && tokens >= from; }

}  // namespace

Route prefill_route(const RouteArgs& args) noexcept {
  const bool cpu = args.device == DeviceKind::kCpu;
  if (cpu && (internal::cpu::isa().amx_bf16 || args.model.lists == 2)) return Route::kDirect;
  const std::span<const Crossover> table = table_for(args);
  const auto row =
      std::ranges::find_if(table, [&](const Crossover& c) { return args.context <= c.context; });
  if (row != table.end()) {
    const auto takes = [&](int32_t Crossover::*way) {
      return reached(args.tokens, least_tokens(table, *row, way, args.context));
    };
    if (args.mha && takes(&Crossover::mha)) return Route::kMha;
    return takes(&Crossover::gathered) ? Route::kGathered : Route::kDirect;
  }
  const Crossover& last = table.back();
  const double least = static_cast<double>(last.gathered) * args.context / last.context;
  return last.gathered != kNever && args.tokens >= least ? Route::kGathered : Route::kDirect;
}

}  // namespace winnow
