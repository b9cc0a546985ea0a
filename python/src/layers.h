// Steps that several calls take, from Python.
#pragma once

#include "call.h"
#include "winnow/index_query.h"
#include "winnow/norm.h"
#include "winnow/prepare_query.h"
#include "winnow/rotate.h"
#include "winnow/select.h"
#include "winnow/write.h"

namespace winnow::python {

// norm=, norm_bias=, eps= and the weight under this name; `otherwise` without norm=.
Norm norm_of(Call& c, const char* weight, const char* otherwise);
// The table under this name, pairs= and slice=.
Rope rope_of(Call& c, const char* table);
// scale=
ScaleMode scale_mode(const Call& c, const char* argument = "scale");
// block=, within=, best= (how many blocks to find) and best_blocks=
SelectBlocks blocks_of(Call& c, int64_t tokens);

// What a function's arguments say, without plan= and kernel=: norm(), write(), prepare_query(),
// index_query().
NormRows norm_rows(Call& c);
WriteArgs write_args(Call& c);
PrepareQueryArgs prepare_query_args(Call& c);
IndexQueryArgs index_query_args(Call& c);

}  // namespace winnow::python
