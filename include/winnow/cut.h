// cut: the top-k of each rank's part of a row -> the top-k of the whole row, over all ranks.
#pragma once

#include <cstddef>
#include <span>

#include "winnow/parallel.h"
#include "winnow/tensor.h"

namespace winnow {

class Plan;

// How the ranks find a row's cut. Both give the same bits.
enum class CutForm : uint8_t {
  // Whichever the model finds faster: gathering brings in more bytes, kOwner has one collective
  // more.
  kAuto,
  // One all_gather; every rank finds the cuts of all rows. 8 K (W - 1) bytes a row into each rank.
  kGather,
  // all_to_all by row: the owner of a row finds its cut, then all_gather of 8 bytes a row.
  // 8 K (W - 1) / W + 8 (W - 1) / W bytes a row; rows are rounded up to a multiple of W.
  kOwner,
};

struct CutArgs {
  // Of Spread::kContext or kHeads: its communicator is used, and the ranks have agreed in refill().
  const Plan* plan = nullptr;
  // Without a plan. None: one rank. The ranks agree on the shapes first, by comm->exchange().
  Communicator* comm = nullptr;
  // What turns this rank's ids into positions of the row. A world of 1: ids are positions already.
  Shard shard = {};
  Tensor ids;     // [T, K] int32: the top-k of this rank's part, as score_select() gives them
  Tensor values;  // [T, K] f32: their logits
  // At least one of the outputs is given; each of them on all ranks or on none.
  // [T, K] int32, out: of `ids`, those of the row's top-k, then -1; may be `ids` itself.
  Tensor kept = {};
  Tensor counts = {};     // [T] int32, out: the number of ids kept
  Tensor positions = {};  // [T, K] int32, out: the row's whole top-k, ascending, then -1
  CutForm form = CutForm::kAuto;
  // cut_workspace_bytes(); a CPU call without a plan may leave it empty and allocates its own.
  std::span<std::byte> workspace = {};
  Target target = {};
};

// The K largest of a row whose parts lie on several ranks, exactly: bit for bit the ids that
// select() gives for the whole row. Order: larger value first, -0 equal to +0, NaN below
// everything, then the lowest position. A row's K-th entry in this order is its cut, 8 bytes; a
// rank keeps its entries up to the cut. Negative ids are no candidates; rows with fewer than K
// candidates keep all. Deterministic. The same call on every rank, with the same T and K; with T =
// 0 nothing is sent.
void cut(const CutArgs& args);

size_t cut_workspace_bytes(const CutArgs& args);

}  // namespace winnow
