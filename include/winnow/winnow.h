// winnow: sparse MLA attention. The includes below are the table of contents, in the order of the
// flow.
#pragma once

// clang-format off
#include "winnow/tensor.h"    // views: Tensor, Cache, Device
#include "winnow/model.h"     // V3.2 and V4 as data; cache shapes
#include "winnow/error.h"     // Error, the one exception
#include "winnow/support.h"   // what runs here

#include "winnow/norm.h"      // RMSNorm and LayerNorm
#include "winnow/rotate.h"    // RoPE and its table
#include "winnow/prepare_query.h"  // projected query heads -> queries
#include "winnow/index_query.h"    // the same for the indexer
#include "winnow/prepare_queries.h"  // both in one call
#include "winnow/compress.h"  // V4: projected rows -> compressed records
#include "winnow/write.h"     // latent KV -> paged cache, and back
#include "winnow/norm_write.h"  // norms and writes in one call
#include "winnow/plan.h"      // batch -> split, chunks, schedule, workspace, kernels
#include "winnow/score.h"     // indexer queries x keys -> logits
#include "winnow/select.h"    // logits -> top-k ids
#include "winnow/locate.h"    // ids -> slots
#include "winnow/attend.h"    // queries x selected records -> output
#include "winnow/precision.h" // how far that may round

#include "winnow/lists.h"     // V4's index lists
#include "winnow/absorb.h"    // projections into and out of the latent space
#include "winnow/pipeline.h"  // all of it in one call

#include "winnow/parallel.h"  // several ranks: communicators and shards
#include "winnow/cut.h"       // top-k of each rank's part -> top-k of the row
#include "winnow/combine.h"   // attention of each rank's part -> attention
#include "winnow/gather_prefix.h"  // every rank's records -> rows of whole sequences
// clang-format on
