// Wide attention on Hopper: the launchers, one per record. `ctas`: how many run at once.
#pragma once

#include "attend/wide_sm90/layout.cuh"

namespace winnow::internal::attend::wide_sm90 {

void launch_v32_bf16(const Args& args, int ctas, cudaStream_t stream);
// Rows in the order of sweep.cuh, whose limits hold.
void launch_v32_bf16_swept(const Args& args, int ctas, cudaStream_t stream);
void launch_v4_bf16(const Args& args, int ctas, cudaStream_t stream);

}  // namespace winnow::internal::attend::wide_sm90
