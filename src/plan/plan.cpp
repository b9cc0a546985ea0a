// plan: a capacity's kernels and workspace, and a batch's split, ids and schedule.
#include "winnow/plan.h"

namespace winnow {

struct Plan::State {
  PlanOptions options;
  int32_t tokens = 0;
};

Plan::Plan(const PlanOptions& options) : state_(std::make_unique<State>()) {
  state_->options = options;
}
Plan::~Plan() = default;
Plan::Plan(Plan&&) noexcept = default;
Plan& Plan::operator=(Plan&&) noexcept = default;
const PlanOptions& Plan::options() const noexcept { return state_->options; }
Schedule Plan::schedule() const noexcept { return {}; }
int32_t Plan::tokens() const noexcept { return state_->tokens; }
const detail::KernelEntry* Plan::chosen(Stage) const noexcept { return nullptr; }

}  // namespace winnow
