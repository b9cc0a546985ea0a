// index_query, as specified.
#include <algorithm>

#include "index_query/kernel.h"

namespace winnow::internal::index_query {

void reference(const Params& p) noexcept {
  for (int64_t t = 0; t < p.tokens; ++t) {
    const int32_t position = p.positions[t * p.position_stride];
    if (!core::in_table(p.rope, position)) continue;
    core::Angles angles;
    core::load_angles(p.rope, position, angles);
    for (int64_t h = 0; h < p.heads; ++h) {
      bf16 row[kWidth];
      std::copy_n(p.q + t * p.q_token + h * p.q_head, kWidth, row);
      bf16* slice = row + core::rope_begin(p.rope, kWidth);
      core::rotate_row(p.rope, angles, slice, slice);
      if (p.hadamard) core::hadamard_row(row, row);
      const int64_t at = t * p.out_token + h * p.out_head;
      float scale = 1;
      if (p.out_is_bf16) std::copy_n(row, kWidth, static_cast<bf16*>(p.out) + at);
      else scale = core::write_tile(p.quantizer, row, kWidth, static_cast<e4m3*>(p.out) + at);
      p.out_weights[t * p.out_weight_token + h * p.out_weight_head] =
          weight_of(p, t, h) * scale * p.factor;
    }
  }
}

}  // namespace winnow::internal::index_query
