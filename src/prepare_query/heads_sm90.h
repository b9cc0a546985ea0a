// prepare_query's parameters as those of a pass over heads.
#pragma once

#include "cuda/heads.h"
#include "prepare_query/kernel.h"

namespace winnow::internal::prepare_query {

cuda::HeadParams heads_of(const Params& p) noexcept;

}  // namespace winnow::internal::prepare_query
