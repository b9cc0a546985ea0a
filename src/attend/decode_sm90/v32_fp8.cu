#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"

namespace winnow::internal::attend::decode_sm90 {

void decode_v32_fp8(const Args& args, Share share, void* stream) {
  launch_size<Row<V32Fp8>, 64>(args, share, stream);
}

int clusters_at_once(int size) {
  using R = Row<V32Fp8>;
  const auto ctas = static_cast<unsigned>(size);
  const Launch<R, 64, Way::kCluster> l(ctas, ctas, nullptr);
  int n = 0;
  if (l.ready || cudaOccupancyMaxActiveClusters(&n, decode<R, 64, Way::kCluster>, &l.config)) n = 0;
  cudaGetLastError();
  return n;
}

}  // namespace winnow::internal::attend::decode_sm90
