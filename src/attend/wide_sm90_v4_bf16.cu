#include "attend/wide_sm90.cuh"
#include "attend/wide_sm90.h"
#include "attend/wide_sm90_rows_bf16.cuh"

namespace winnow::attention::wide {

void attend_v4_bf16(const Args& args, int ctas, void* stream) {
  launch<Rows<V4Bf16>>(args, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace winnow::attention::wide
