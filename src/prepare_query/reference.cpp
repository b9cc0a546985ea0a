// prepare_query, as specified.
#include "prepare_query/kernel.h"

namespace winnow::internal::prepare_query {

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int32_t position = p.positions[t * p.position_stride];
    if (!core::in_table(p.rope, position)) continue;
    core::Angles angles;
    core::load_angles(p.rope, position, angles);
    for (int64_t h = 0; h < p.heads; ++h) {
      bf16* out = p.out + t * p.out_token + h * p.out_head;
      core::norm_row(p.norm, p.q + t * p.q_token + h * p.q_head, p.width, out);
      bf16* slice = out + core::rope_begin(p.rope, p.width);
      core::rotate_row(p.rope, angles, slice, slice);
    }
  }
}

}  // namespace winnow::internal::prepare_query
