// Random delays at the barriers of Hopper kernels, set from the host: see barriers.h.
#pragma once

#include <cstdint>

namespace winnow::testing {

struct Delays {
  // 0: none. Odd seeds choose anew every few microseconds, even ones keep a warp that is late at a
  // barrier late there.
  uint32_t seed = 0;
  // Shared-memory bytes [first, last), counted from where dynamic shared memory begins. Waits for
  // the mbarriers in it are left out: a planted defect.
  uint32_t skip_first = 0, skip_last = 0;
};

// For all kernels that were compiled with barriers.h, from the next launch on.
void set_delays(const Delays& delays);

// Called by each source that was compiled with barriers.h, with its copy of Delays on the device.
void register_delays(const void* symbol);
int delayed_sources();

// The mbarriers by which consumers give the rows' memory back, as first and last of Delays.
Delays without_waits_of_decode_ring();  // V3.2, fp8, 64 heads a CTA
Delays without_waits_of_wide_ring();    // V3.2, bf16

}  // namespace winnow::testing
