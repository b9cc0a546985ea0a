// Steps that several calls take, from C.
#pragma once

#include "c_api/common.h"
#include "winnow/norm.h"
#include "winnow/rotate.h"
#include "winnow/select.h"
#include "winnow/write.h"

namespace winnow::internal::c_api {

Norm norm_of(const winnow_norm_step& norm, const In& in);
Rope rope_of(const winnow_rope& rope, const In& in);
WriteArgs write_args(const winnow_write_args& a, const In& in);
ScaleMode scale_of(winnow_scale_mode scale, const In& in);

inline SelectBlocks blocks_of(const winnow_select_blocks& b, const In& in) {
  return {.size = b.size ? b.size : 8,
          .within = in(b.within, "blocks.within"),
          .best = in(b.best, "blocks.best")};
}

}  // namespace winnow::internal::c_api
