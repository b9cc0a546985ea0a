// Which route a prefill takes: crossover points read off measurements.
//
// `gathered` and `mha` of a row are the new tokens from which that route is faster than the ones
// before it, with the row's context. The H200's tables stand in core/tuning_h200.h. Between two
// rows the points are interpolated, or the longer context's where one of the two has none; beyond
// the last row the cost of gathering grows with the context and is what decides.
#include <algorithm>
#include <cstdint>
#include <span>

#include "core/tuning_h200.h"
#include "cpu/isa.h"
#include "winnow/plan.h"

namespace winnow {

namespace {

namespace tuned = internal::core::tuning_h200::route;
using tuned::Crossover;
using tuned::kNever;

// AMD EPYC (Zen 4), 2 cores that others used too, 2026-11-15, c71596d, 16 heads, `winnow bench plan
// --set routes --cache warm`:
// reading the pages was never slower than gathering them. With AMX attend() is several times as
// fast, and attend_mha() is not.
constexpr Crossover kCpu[] = {{256, kNever, 185}, {1024, kNever, 458}, {65536, kNever, kNever}};

// The table measured with the number of heads that is nearest, in factors of two.
std::span<const Crossover> table_for(const RouteArgs& args) noexcept {
  if (args.device == DeviceKind::kCpu) return kCpu;
  if (args.model.lists == 2) {
    if (args.heads >= tuned::kNear128Heads) return tuned::kV4Heads128;
    return tuned::kV4Heads64;
  }
  if (args.heads >= tuned::kNear128Heads) return tuned::kV32Heads128;
  if (args.heads >= tuned::kNear64Heads) return tuned::kV32Heads64;
  if (args.heads >= tuned::kNear32Heads) return tuned::kV32Heads32;
  return tuned::kV32Heads16;
}

// The new tokens from which this route is taken, between the row before and `row`.
int32_t least_tokens(std::span<const Crossover> table, const Crossover& row,
                     int32_t Crossover::*route, int32_t context) {
  const Crossover& before = &row == table.data() ? row : (&row)[-1];
  if (row.*route == kNever || before.*route == kNever || &before == &row) return row.*route;
  const double part =
      static_cast<double>(context - before.context) / (row.context - before.context);
  return before.*route + static_cast<int32_t>(part * (row.*route - before.*route));
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
    const auto takes = [&](int32_t Crossover::*route) {
      return reached(args.tokens, least_tokens(table, *row, route, args.context));
    };
    if (args.mha && takes(&Crossover::mha)) return Route::kMha;
    return takes(&Crossover::gathered) ? Route::kGathered : Route::kDirect;
  }
  const Crossover& last = table.back();
  const double least = static_cast<double>(last.gathered) * args.context / last.context;
  return last.gathered != kNever && args.tokens >= least ? Route::kGathered : Route::kDirect;
}

}  // namespace winnow
