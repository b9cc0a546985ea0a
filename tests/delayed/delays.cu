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

Delays delays_of(uint32_t seed, Delays defect) {
  defect.factor = seed == 0 ? 0 : (seed * 0x9e3779b1u ^ 0x85ebca77u) | 1;
  return defect;
}

void set_delays(const Delays& delays) {
  for (const void* symbol : symbols())
    if (const cudaError_t e = cudaMemcpyToSymbol(symbol, &delays, sizeof delays))
      throw std::runtime_error(cudaGetErrorString(e));
}

Delays decode_ring_freed_early() {
  namespace decode = internal::attend::decode_sm90;
  using Memory = decode::Smem<decode::RowTraits<V32Fp8>, 64>;
  return {.early_first = offsetof(Memory, stage_empty),
          .early_last = offsetof(Memory, block_ready)};
}

Delays wide_ring_freed_early() {
  namespace wide = internal::attend::wide_sm90;
  using Memory = wide::Smem<V32>;
  constexpr auto kFirst = static_cast<uint32_t>(offsetof(Memory, empty));
  return {.early_first = kFirst, .early_last = kFirst + uint32_t{sizeof(Memory::empty)}};
}

}  // namespace winnow::testing
