// The copies of Delays on the device, one for each source, and where the rings' barriers lie.
#include "delayed/delays.h"

#include <stdexcept>
#include <vector>

#include "attend/decode_sm90/layout.cuh"
#include "attend/wide_sm90/layout.cuh"

namespace winnow::testing {

namespace {

std::vector<const void*>& symbols() {
  static std::vector<const void*> all;
  return all;
}

}  // namespace

void register_delays(const void* symbol) { symbols().push_back(symbol); }

int delayed_sources() { return static_cast<int>(symbols().size()); }

void set_delays(const Delays& delays) {
  for (const void* symbol : symbols())
    if (const cudaError_t e = cudaMemcpyToSymbol(symbol, &delays, sizeof delays))
      throw std::runtime_error(cudaGetErrorString(e));
}

Delays without_waits_of_decode_ring() {
  namespace decode = internal::attend::decode_sm90;
  using Memory = decode::Smem<decode::RowTraits<V32Fp8>, 64>;
  return {.skip_first = offsetof(Memory, stage_empty), .skip_last = offsetof(Memory, block_ready)};
}

Delays without_waits_of_wide_ring() {
  namespace wide = internal::attend::wide_sm90;
  using Memory = wide::Smem<V32>;
  constexpr auto kFirst = static_cast<uint32_t>(offsetof(Memory, empty));
  return {.skip_first = kFirst, .skip_last = kFirst + uint32_t{sizeof(Memory::empty)}};
}

}  // namespace winnow::testing
