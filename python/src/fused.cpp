// norm_write, prepare_queries: several functions in one call, with a dict of arguments for each.
#include "layers.h"
#include "winnow/norm_write.h"
#include "winnow/prepare_queries.h"

namespace winnow::python {

namespace {

nb::object norm_write_(Call& c) {
  NormWriteArgs a;
  c.parts("norm", "norm", 2, [&](Call& part, size_t i) { a.norm.rows[i] = norm_rows(part); });
  c.parts("write", "write", 2, [&](Call& part, size_t i) { a.write[i] = write_args(part); });
  a.target = c.target();
  c.run([&] { norm_write(a); });
  return c.result({"out"});
}

nb::object prepare_queries_(Call& c) {
  PrepareQueriesArgs a;
  c.parts("query", "prepare_query", 1,
          [&](Call& part, size_t) { a.query = prepare_query_args(part); });
  c.parts("index", "index_query", 1, [&](Call& part, size_t) { a.index = index_query_args(part); });
  a.target = c.target();
  c.run([&] { prepare_queries(a); });
  return c.result({"out", "out_weights"});
}

}  // namespace

void bind_fused(nb::module_& m) {
  def(m,
      "def norm_write(*, norm: dict | list[dict] | None = None, write: dict | list[dict] | None = "
      "None, kernel: str | None = None) -> Array | tuple[Array, ...]",
      norm_write_,
      R"(norm() and write() in one call, on a GPU in one launch: the bits of the single calls.

norm   arguments of norm(), for one or two sets of rows: dict(x=..., weight=...)
write  arguments of write(), for one or two caches: KV records and index keys

No part may read what another writes. Returns norm()'s out, a tuple of two, or an empty one.)");
  def(m,
      "def prepare_queries(*, query: dict | None = None, index: dict | None = None, kernel: str | "
      "None = None) -> Array | tuple[Array, ...]",
      prepare_queries_,
      R"(prepare_query() and index_query() in one call, on a GPU in one launch: their bits.

query  arguments of prepare_query(): dict(q=..., positions=..., table=...)
index  arguments of index_query()

Neither may read what the other writes. Returns the results of those that are given: (q, index
queries, index weights).)");
}

}  // namespace winnow::python
