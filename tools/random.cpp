#include "random.h"

#include <algorithm>

#include "core/formats.h"

namespace winnow::tools {

void Random::normals(std::span<float> out, float sigma) {
  for (float& x : out) x = sigma * normal();
}

void Random::normals(std::span<bf16> out, float sigma) {
  for (bf16& x : out) x = to_bf16(sigma * normal());
}

void Random::normals(std::span<e4m3> out, float sigma) {
  for (e4m3& x : out) x = to_e4m3(sigma * normal());
}

void Random::choose(std::span<int32_t> out, int64_t range) {
  const int64_t wanted = std::min<int64_t>(static_cast<int64_t>(out.size()), range);
  // Selection sampling: one pass over the range, each number taken with the chance still needed.
  int64_t taken = 0;
  for (int64_t i = 0; i < range && taken < wanted; ++i)
    if (draw(0, range - i - 1) < wanted - taken)
      out[static_cast<size_t>(taken++)] = static_cast<int32_t>(i);
  std::fill(out.begin() + taken, out.end(), -1);
}

}  // namespace winnow::tools
