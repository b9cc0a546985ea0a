#include "attend/decode_sm90/decode.cuh"
#include "attend/decode_sm90/launch.h"

namespace winnow::internal::attend::decode_sm90 {

void launch_v32_fp8(const Args& args, Share share, cudaStream_t stream) {
  launch_heads<RowTraits<V32Fp8>, 64>(args, share, stream);
}

int clusters_at_once(int size) {
  using Row = RowTraits<V32Fp8>;
  const auto ctas = static_cast<unsigned>(size);
  Launch<Row, 64, Way::kCluster> launch(ctas, nullptr);
  launch.in_clusters(ctas, 1);
  int count = 0;
  const bool failed = launch.ready != cudaSuccess ||
                      cudaOccupancyMaxActiveClusters(&count, decode<Row, 64, Way::kCluster>,
                                                     &launch.config) != cudaSuccess;
  cudaGetLastError();
  return failed ? 0 : std::max(count, 1);
}

}  // namespace winnow::internal::attend::decode_sm90
