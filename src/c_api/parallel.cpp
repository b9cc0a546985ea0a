// Ranks, cut and combine in C.
#include "c_api/communicator.h"
#include "winnow/combine.h"
#include "winnow/cut.h"

using winnow::internal::c_api::CallersRanks;
using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;
using winnow::internal::c_api::ranks_of;

namespace winnow::internal::c_api {

static_assert(int(Spread::kContext) == WINNOW_SPREAD_CONTEXT);
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
          .shard = {a.shard.world, a.shard.rank, a.shard.interleave},
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

extern "C" {

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

}  // extern "C"
