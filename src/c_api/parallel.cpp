// Ranks, cut, combine and queries over ranks in C.
#include <algorithm>

#include "c_api/communicator.h"
#include "winnow/combine.h"
#include "winnow/cut.h"
#include "winnow/gather_prefix.h"

using winnow::internal::c_api::CallersRanks;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;
using winnow::internal::c_api::ranks_of;
using winnow::internal::c_api::shard_of;

namespace winnow::internal::c_api {

static_assert(int(Spread::kQueries) == WINNOW_SPREAD_QUERIES);
static_assert(int(Wire::kBf16) == WINNOW_WIRE_BF16);
static_assert(int(CutForm::kOwner) == WINNOW_CUT_OWNER);

std::unique_ptr<CallersRanks> ranks_of(const winnow_communicator* c, const char* argument,
                                       const In& in) {
  if (!c) return nullptr;
  const winnow_communicator own = in.sized(c, argument);
  in.check().that(own.all_gather && own.all_to_all && own.exchange, argument,
                  "all_gather, all_to_all and exchange", "a null function");
  return std::make_unique<CallersRanks>(own);
}

namespace {

CutArgs cut_args(const winnow_cut_args& a, Communicator* comm, const In& in) {
  return {.plan = in.plan(a.plan),
          .comm = comm,
          .shard = shard_of(a.shard),
          .ids = in(a.ids, "ids"),
          .values = in(a.values, "values"),
          .kept = in(a.kept, "kept"),
          .counts = in(a.counts, "counts"),
          .positions = in(a.positions, "positions"),
          .form = in.choice(a.form, "form", CutForm::kOwner),
          .workspace = in.bytes(a.workspace, a.workspace_bytes),
          .target = in(a.target)};
}

CombineArgs combine_args(const winnow_combine_args& a, Communicator* comm, const In& in) {
  return {.plan = in.plan(a.plan),
          .comm = comm,
          .wire = in.choice(a.wire, "wire", Wire::kBf16),
          .partial_out = in(a.partial_out, "partial_out"),
          .partial_lse = in(a.partial_lse, "partial_lse"),
          .sink = in(a.sink, "sink"),
          .out = in(a.out, "out"),
          .lse = in(a.lse, "lse"),
          .workspace = in.bytes(a.workspace, a.workspace_bytes),
          .target = in(a.target)};
}

}  // namespace
}  // namespace winnow::internal::c_api

winnow_plan::winnow_plan(winnow::Plan p, std::unique_ptr<CallersRanks> c,
                         std::unique_ptr<CallersRanks> other)
    : comm(std::move(c)), control(std::move(other)), plan(std::move(p)) {}
winnow_plan::~winnow_plan() = default;

namespace {

bool answers(const winnow_shard& s, int64_t number) {
  return s.world > 0 && s.interleave > 0 && s.rank >= 0 && s.rank < s.world && number >= 0;
}

}  // namespace

extern "C" {

int32_t winnow_shard_owner(winnow_shard shard, int64_t position) {
  return answers(shard, position) ? shard_of(shard).owner(position) : -1;
}
int64_t winnow_shard_local(winnow_shard shard, int64_t position) {
  return answers(shard, position) ? shard_of(shard).local(position) : -1;
}
int64_t winnow_shard_global(winnow_shard shard, int64_t local) {
  if (!answers(shard, local)) return -1;
  // A position that leaves 64 bits is none.
  const int64_t round = int64_t{shard.world} * shard.interleave;
  return local / shard.interleave < INT64_MAX / round ? shard_of(shard).global(local) : -1;
}
int64_t winnow_shard_local_length(winnow_shard shard, int64_t length) {
  return answers(shard, length) ? shard_of(shard).local_length(length) : -1;
}

bool winnow_context_is_cheaper(int64_t tokens, int64_t context) {
  return winnow::context_is_cheaper(tokens, context);
}

winnow_status winnow_cut(const winnow_cut_args* args) {
  return guarded("cut", args, [](const winnow_cut_args& a, const In& in) {
    const auto comm = ranks_of(a.comm, "comm", in);
    winnow::cut(winnow::internal::c_api::cut_args(a, comm.get(), in));
  });
}

winnow_status winnow_cut_workspace_bytes(const winnow_cut_args* args, size_t* out) {
  return guarded("cut", args, [&](const winnow_cut_args& a, const In& in) {
    const auto comm = ranks_of(a.comm, "comm", in);
    in.given(out, "out") =
        winnow::cut_workspace_bytes(winnow::internal::c_api::cut_args(a, comm.get(), in));
  });
}

winnow_status winnow_combine(const winnow_combine_args* args) {
  return guarded("combine", args, [](const winnow_combine_args& a, const In& in) {
    const auto comm = ranks_of(a.comm, "comm", in);
    winnow::combine(winnow::internal::c_api::combine_args(a, comm.get(), in));
  });
}

winnow_status winnow_combine_workspace_bytes(const winnow_combine_args* args, size_t* out) {
  return guarded("combine", args, [&](const winnow_combine_args& a, const In& in) {
    const auto comm = ranks_of(a.comm, "comm", in);
    in.given(out, "out") =
        winnow::combine_workspace_bytes(winnow::internal::c_api::combine_args(a, comm.get(), in));
  });
}

winnow_status winnow_shard_batch(const winnow_batch* batch, winnow_shard shard,
                                 winnow_batch_share* out) {
  return guarded("shard_batch", batch, [&](const winnow_batch& b, const In& in) {
    winnow_batch_share& to = in.given(out, "out");
    const winnow::BatchShare share =
        winnow::shard_batch({.query_starts = in(b.query_starts, "query_starts"),
                             .seq_lens = in(b.seq_lens, "seq_lens"),
                             .tokens = b.tokens},
                            shard_of(shard));
    const auto count = static_cast<int64_t>(share.tokens.size());
    in.check().that(to.query_starts && to.seq_lens && to.tokens && to.positions, "out", "arrays",
                    "a null pointer");
    in.check().that(count <= to.capacity, "out.capacity", winnow::cat("at least ", count),
                    winnow::cat(to.capacity));
    std::copy(share.query_starts.begin(), share.query_starts.end(), to.query_starts);
    std::copy(share.seq_lens.begin(), share.seq_lens.end(), to.seq_lens);
    std::copy(share.tokens.begin(), share.tokens.end(), to.tokens);
    std::copy(share.positions.begin(), share.positions.end(), to.positions);
    to.count = count;
  });
}

winnow_status winnow_gather_prefix(const winnow_gather_prefix_args* args) {
  return guarded("gather_prefix", args, [](const winnow_gather_prefix_args& a, const In& in) {
    const auto comm = ranks_of(a.comm, "comm", in);
    winnow::gather_prefix({.plan = in.plan(a.plan),
                           .cache = in(a.cache, "cache"),
                           .block_table = in(a.block_table, "block_table"),
                           .keys = in(a.keys, "keys"),
                           .key_table = in(a.key_table, "key_table"),
                           .rows = in.bytes(a.rows, a.rows_bytes),
                           .comm = comm.get(),
                           .target = in(a.target)});
  });
}

winnow_status winnow_gather_prefix_bytes(const winnow_plan* plan, size_t* out) {
  return guarded("gather_prefix", [&](const In& in) {
    in.given(out, "out") = winnow::gather_prefix_bytes(in.given(plan, "plan").plan);
  });
}

}  // extern "C"
