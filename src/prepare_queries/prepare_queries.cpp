// prepare_queries: checks both parts, chooses the kernel. On the CPU a kernel is those of
// prepare_query() and index_query() one after the other, which is also the specification.
#include "winnow/prepare_queries.h"

#include "core/check.h"
#include "prepare_queries/kernel.h"

namespace winnow {

namespace internal::prepare_queries {

namespace {

template <void (*kQuery)(const prepare_query::Params&) noexcept,
          void (*kIndex)(const index_query::Params&) noexcept>
void compose(const Params& p) noexcept {
  if (p.query.tokens > 0) kQuery(p.query);
  if (p.index.tokens > 0) kIndex(p.index);
}

}  // namespace

std::span<const PrepareQueriesKernel> kernels() {
  static constexpr PrepareQueriesKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing}, nullptr, sm90},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine},
       nullptr,
       compose<prepare_query::simd, index_query::simd>},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine},
       nullptr,
       compose<prepare_query::reference, index_query::reference>},
  };
  return table;
}

namespace {

Params checked(const PrepareQueriesArgs& a) {
  Params p;
  p.device = a.target.device;
  const bool query = a.query.q || a.query.out;
  const bool index = a.index.q || a.index.out;
  const Check check("prepare_queries");
  check.that(query || index, "query", "heads of a query or an index query", "neither");
  if (query) {
    PrepareQueryArgs part = a.query;
    part.target = a.target;
    p.query = prepare_query::checked(Check("prepare_queries", "query."), part);
  }
  if (index) {
    IndexQueryArgs part = a.index;
    part.target = a.target;
    p.index = index_query::checked(Check("prepare_queries", "index."), part);
  }
  if (query && index) {
    const bool normed = a.query.norm.kind != NormKind::kNone;
    check.apart({{a.query.out, "query.out"},
                 {a.index.out, "index.out"},
                 {a.index.out_weights, "index.out_weights"}},
                {{a.query.q, "query.q", &a.query.out},
                 {Check::read(normed, a.query.norm.weight), "query.norm.weight"},
                 {Check::read(normed, a.query.norm.bias), "query.norm.bias"},
                 {a.query.positions, "query.positions"},
                 {a.query.rope.table, "query.rope.table"},
                 {a.index.q, "index.q", &a.index.out},
                 {a.index.weights, "index.weights"},
                 {a.index.positions, "index.positions"},
                 {a.index.rope.table, "index.rope.table"}});
  }
  return p;
}

}  // namespace
}  // namespace internal::prepare_queries

void prepare_queries(const PrepareQueriesArgs& args) try {
  using namespace internal::prepare_queries;
  const Params params = checked(args);
  run("prepare_queries", choose("prepare_queries", kernels(), Shape{}, args.target), params);
} catch (const std::bad_alloc&) {
  out_of_memory("prepare_queries");
}

}  // namespace winnow
