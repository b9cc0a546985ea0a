// prepare_queries: everything between the projections of a layer's queries and score(), in one
// call.
#pragma once

#include "winnow/index_query.h"
#include "winnow/prepare_query.h"
#include "winnow/tensor.h"

namespace winnow {

// Either part may be left empty. The call's target applies to both; targets of the parts are
// ignored.
struct PrepareQueriesArgs {
  PrepareQueryArgs query = {};
  IndexQueryArgs index = {};
  Target target = {};
};

// prepare_query(query), index_query(index): their bits, on a device in one launch. Neither may read
// what the other writes. Both are checked before anything is written.
void prepare_queries(const PrepareQueriesArgs& args);

}  // namespace winnow
