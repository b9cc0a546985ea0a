// norm_write: everything between a layer's first projections and those of its queries, in one call.
#pragma once

#include "winnow/norm.h"
#include "winnow/tensor.h"
#include "winnow/write.h"

namespace winnow {

// Any part may be left empty. The call's target applies to all of them; plans and targets of the
// parts are ignored.
struct NormWriteArgs {
  NormArgs norm = {};             // of the query latents
  WriteArgs write[2] = {{}, {}};  // KV records, and index keys
  Target target = {};
};

// norm(norm), write(write[0]), write(write[1]): their bits, on a device in one launch. No part may
// read what another writes. Every part is checked before anything is written.
void norm_write(const NormWriteArgs& args);

}  // namespace winnow
