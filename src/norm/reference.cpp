// norm, as specified.
#include "norm/kernel.h"

namespace winnow::internal::norm {

void reference(const Params& p) noexcept {
  for (const Rows& rows : p.rows)
    for (int64_t i = 0; i < rows.count; ++i)
      core::norm_row(rows.norm, rows.x + i * rows.x_stride, rows.width,
                     rows.out + i * rows.out_stride);
}

}  // namespace winnow::internal::norm
