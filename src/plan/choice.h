// What a plan settles once, for its capacity: defaults, mode, kernels, workspace.
#pragma once

#include <array>
#include <cstddef>
#include <string>

#include "core/kernel_table.h"
#include "core/schedule.h"
#include "winnow/plan.h"

namespace winnow::internal::plan {

// Of options as requested: whether each prefill has its own route.
bool chooses_routes(const PlanOptions& options) noexcept;

// The options with every default replaced and the mode chosen; throws what is out of range.
PlanOptions resolve(PlanOptions options);

// Of resolved options: the lists and workers of a part of `tokens` tokens.
ScheduleShape schedule_shape(const PlanOptions& options, bool gathered, int64_t tokens) noexcept;

struct Choice {
  std::array<Usable, kStages> usable;
  std::array<std::string, kStages> reasons;  // for the capacity
  size_t workspace_bytes = 0;
};
Choice choose_kernels(const PlanOptions& options);

// The name of the kernel that a stage runs for `tokens` tokens of resolved options; of kAttend, for
// a part that is gathered or not.
const char* kernel_for(const Choice& choice, const PlanOptions& options, Stage stage,
                       int64_t tokens, bool gathered) noexcept;

}  // namespace winnow::internal::plan
