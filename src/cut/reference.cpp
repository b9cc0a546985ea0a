// cut, as specified: all candidates of a row in order.
#include <algorithm>
#include <functional>

#include "cut/kernel.h"

namespace winnow::internal::cut {

void reference(const Params& p) noexcept {
  int64_t* const orders = reinterpret_cast<int64_t*>(p.scratch);
  for (int64_t t = 0; t < p.rows; ++t) {
    int64_t* end = orders;
    for (int32_t b = 0; b < p.blocks; ++b)
      for (int64_t k = 0; k < p.width; ++k)
        if (const int32_t position = p.positions_in(t, b)[k]; position >= 0)
          *end++ = order_of(p.values(t, b)[k], position);
    std::sort(orders, end, std::greater<>());
    const bool all = end - orders <= p.width || p.width == 0;
    p.cuts[t] = all ? kTakeAll : orders[p.width - 1];
    end = std::min(end, orders + p.width);
    if (!p.positions) continue;
    int32_t* const out = p.positions + t * p.position_stride;
    int32_t* last = out;
    // The low half of an order is its position, from above.
    for (const int64_t* order = orders; order != end; ++order)
      *last++ = INT32_MAX - static_cast<int32_t>(*order & UINT32_MAX);
    std::sort(out, last);
    std::fill(last, out + p.width, -1);
  }
  if (p.keeping) keep(*p.keeping);
}

}  // namespace winnow::internal::cut
