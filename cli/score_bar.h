// How far indexer logits may be from the reference: the bound that <winnow/score.h> states.
#pragma once

#include <cstdint>

#include "accuracy.h"
#include "winnow/score.h"

namespace winnow::cli {

// Compares token t's row of args.logits with the reference's row `want`, [1, N] f32, at every
// `step`-th key of the token's range. Paged keys only.
tools::Deviation compare_scores(const ScoreArgs& args, int64_t t, const Tensor& want, int64_t step);

}  // namespace winnow::cli
