#include "attend/wide_sm90.cuh"
#include "attend/wide_sm90.h"
#include "attend/wide_sm90_rows_bf16.cuh"

namespace winnow::attention::wide {

void attend_v32_bf16_swept(const Args& args, int ctas, void* stream) {
  launch<Rows<V32Bf16, true>>(args, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::attention::wide
