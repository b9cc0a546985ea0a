// prepare_query on the device: a pass over heads (cuda/heads.h).
#include "prepare_query/heads_sm90.h"

namespace winnow::internal::prepare_query {

cuda::HeadParams heads_of(const Params& p) noexcept {
  cuda::HeadParams heads;
  heads.x = p.q;
  heads.x_token = p.q_token;
  heads.x_head = p.q_head;
  heads.out = p.out;
  heads.out_token = p.out_token;
  heads.out_head = p.out_head;
  heads.tokens = p.tokens;
  heads.heads = p.heads;
  heads.width = p.width;
  heads.norm = p.norm;
  heads.positions = p.positions;
  heads.position_stride = p.position_stride;
  heads.rope = p.rope;
  heads.device = p.device;
  return heads;
}

void sm90(const Params& p) noexcept { cuda::prepare_heads(heads_of(p)); }

}  // namespace winnow::internal::prepare_query
