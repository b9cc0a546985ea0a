// Random delays at the barriers of Hopper kernels, set from the host: see barriers.h.
#pragma once

#include <cstdint>

namespace winnow::testing {

struct Delays {
  // Multiplies a hash; 0: no delays.
  uint32_t factor = 0;
  // Shared-memory bytes [first, last), counted from where dynamic shared memory begins. The
  // mbarriers in it complete a phase at the first arrival: a planted defect.
  uint32_t early_first = 0, early_last = 0;
};

// The delays of a seed, with or without a defect; 0: none.
Delays delays_of(uint32_t seed, Delays defect = {});
// For all kernels that were compiled with barriers.h, from the next launch on.
void set_delays(const Delays& delays);

// Called by each source that was compiled with barriers.h, with its copy of Delays on the device.
void register_delays(const void* symbol);
int delayed_sources();

// Defects: the ring's memory is given back when the first consumer has read it.
Delays decode_ring_freed_early();  // V3.2, fp8, 64 heads a CTA
Delays wide_ring_freed_early();    // V3.2, bf16

}  // namespace winnow::testing
