// What pipeline() asks of combine() beside the call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace winnow::internal::combine {

// Workspace of any call of up to `tokens` tokens over `ranks` ranks.
size_t most_workspace(int64_t tokens, int64_t heads, int64_t d_v, int32_t ranks);

}  // namespace winnow::internal::combine
