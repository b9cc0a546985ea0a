// What prepare_queries()'s kernels see: the parts' own parameters, both checked.
#pragma once

#include <span>

#include "core/kernel_table.h"
#include "index_query/kernel.h"
#include "prepare_query/kernel.h"
#include "winnow/prepare_queries.h"

namespace winnow::internal::prepare_queries {

struct Params {
  prepare_query::Params query;  // no tokens: none
  index_query::Params index;
  Device device;
};

struct Shape {};  // every kernel takes every call
using PrepareQueriesKernel = Kernel<Shape, Params>;
std::span<const PrepareQueriesKernel> kernels();

void sm90(const Params& p) noexcept;  // CUDA builds

}  // namespace winnow::internal::prepare_queries
