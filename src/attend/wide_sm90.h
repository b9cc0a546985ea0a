// Wide attention on Hopper: the launchers, one per record. `pair`: two CTAs share a token's rows.
#pragma once

#include "attend/wide_sm90_layout.cuh"

namespace winnow::attention::wide {

struct Grid {
  bool pair = false;
  int ctas = 132;  // that run at once
  void* stream = nullptr;
};

void attend_v32_bf16(const Args& args, const Grid& grid);
void attend_v4_bf16(const Args& args, const Grid& grid);

}  // namespace winnow::attention::wide
