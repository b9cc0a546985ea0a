// combine: every rank's attention over its part of the context -> the attention over all of it, for
// this rank's share of the heads.
#pragma once

#include <cstddef>
#include <span>

#include "winnow/parallel.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

struct CombineArgs {
  // Of Spread::kContext: its communicator and wire are used; the ranks have agreed in refill().
  const Plan* plan = nullptr;
  // Without a plan. None: one rank. The ranks agree on the shapes first, by comm->exchange().
  Communicator* comm = nullptr;
  Wire wire = Wire::kF32;
  // [T, H, d_v] f32: all heads over this rank's part, made without a sink. Or [W, T, H / W, d_v],
  // blocks of heads with partial_lse [W, T, H / W]: where rows of values follow each other, their
  // lse follows them and blocks begin at the next multiple of 16 bytes, they are sent from where
  // they are (Wire::kF32), without a copy.
  Tensor partial_out;
  Tensor partial_lse;  // [T, H] f32, natural; +inf and -inf both mean "empty"
  Tensor sink = {};    // [H / W] f32, optional: of this rank's heads; applied once, here
  Tensor out;          // [T, H / W, d_v] bf16 or f32: heads [rank H / W, (rank + 1) H / W)
  Tensor lse = {};     // [T, H / W] f32, optional; -inf where all parts are empty
  // combine_workspace_bytes(); a CPU call without a plan may leave it empty and allocates its own.
  std::span<std::byte> workspace = {};
  Target target = {};
};

// One all_to_all of H / W * (4 d_v + 4) bytes a token to every rank (Wire::kBf16: 2 d_v + 4), in
// all rounded up to 16, then merge() in the order of the ranks: the bits do not depend on the
// transport. H is a multiple of W. The same call on every rank; with T = 0 nothing is sent.
void combine(const CombineArgs& args);

size_t combine_workspace_bytes(const CombineArgs& args);

}  // namespace winnow
