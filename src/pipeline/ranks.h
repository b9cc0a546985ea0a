// The stages of pipeline() that ranks share out.
#pragma once

#include "core/arena.h"
#include "pipeline/pipeline_checks.h"

// Beside the public verbs, in their namespace: a shared library hides it.
#pragma GCC visibility push(hidden)
namespace winnow {

// What they hand on to each other, laid out for the plan's capacity; empty for one rank.
struct RankMemory {
  std::span<std::byte> exchange;               // of cut() and combine()
  int32_t* own_ids = nullptr;                  // kHeads: this rank's rows of them
  float* values = nullptr;                     // [T, picked]
  int32_t *starts = nullptr, *ends = nullptr;  // kHeads: [T], this rank's keys
  int32_t* counts = nullptr;                   // kContext: [T], entries that this rank attends to
  std::byte* parts = nullptr;                  // kContext: partial results in blocks of heads

  RankMemory() = default;
  RankMemory(Arena& arena, const PlanOptions& options, int64_t picked);
};

// score_select() and what the ranks must tell each other: all.ids get the ids of all tokens, with
// room for rows up to a multiple of the ranks. kHeads: positions. kContext: this rank's own, with
// their counts in memory.counts.
void select_over_ranks(const Plan& plan, const ScoreSelectArgs& all, const RankMemory& memory);

// kContext: attend() over this rank's entries, as long as the lists' lengths say, then combine().
void attend_over_ranks(AttendArgs args, const RankMemory& memory);

}  // namespace winnow
#pragma GCC visibility pop
