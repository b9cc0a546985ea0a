#include "attend/wide_sm90/launch.h"
#include "attend/wide_sm90/rows_bf16.cuh"
#include "attend/wide_sm90/wide.cuh"

namespace winnow::internal::attend::wide_sm90 {

void launch_v4_bf16(const Args& args, int ctas, cudaStream_t stream) {
  cuda::keep_error(launch<Rows<V4Bf16>>(args, ctas, stream));
}

}  // namespace winnow::internal::attend::wide_sm90
