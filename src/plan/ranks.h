// How the ranks of a plan agree: on its options and kernels once, on the batch in every refill().
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "parallel/agree.h"
#include "plan/choice.h"
#include "winnow/plan.h"

namespace winnow::internal::plan {

// Where the ranks of these options agree; null where a rank works alone.
Communicator* control_of(const Parallel& parallel) noexcept;

// Whether a rank's caches hold a part of every sequence.
bool holds_shard(const Parallel& parallel) noexcept;

// Throws what the options cannot do over several ranks.
void check_parallel(const PlanOptions& options);

// The agreement of a plan's ranks, with the memory for it.
class Ranks {
 public:
  Ranks() = default;
  // Compares resolved options and the kernels chosen for them.
  Ranks(const PlanOptions& options, const Choice& choice);
  // Compares a batch that this rank accepts. Does not allocate.
  void agree_on(const Batch& batch, int64_t tokens);

 private:
  Communicator* control_ = nullptr;
  std::vector<std::byte> room_;
};

}  // namespace winnow::internal::plan
