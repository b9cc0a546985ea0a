// How the ranks of a plan agree.
#include "plan/ranks.h"

#include "core/check.h"
#include "winnow/support.h"

namespace winnow::internal::plan {

namespace {

// FNV-1a over the bytes of a span, from `hash` on.
template <class T>
uint64_t hashed(std::span<const T> values, uint64_t hash) {
  for (const std::byte b : std::as_bytes(values))
    hash = (hash ^ static_cast<uint64_t>(b)) * 0x100000001b3;
  return hash;
}
constexpr uint64_t kHashBasis = 0xcbf29ce484222325;

}  // namespace

Communicator* control_of(const Parallel& p) noexcept {
  if (!p.comm || p.spread == Spread::kNone || p.comm->size() == 1) return nullptr;
  return p.control ? p.control : p.comm;
}

bool holds_shard(const Parallel& p) noexcept {
  const bool sharded = p.spread == Spread::kQueries && p.sharded;
  return control_of(p) && (p.spread == Spread::kContext || sharded);
}

void check_parallel(const PlanOptions& o) {
  const Check check("plan");
  const Parallel& p = o.parallel;
  check.choice(p.spread, "parallel.spread", Spread::kQueries);
  check.that(!p.sharded || p.spread == Spread::kQueries, "parallel.sharded",
             "false unless the spread is kQueries", "true");
  check.choice(p.wire, "parallel.wire", Wire::kBf16);
  check.range(p.interleave, "parallel.interleave", 1, INT32_MAX);
  check.that(p.comm || p.spread == Spread::kNone, "parallel.comm", "a communicator", "none");
  if (!control_of(p)) return;
  parallel::check_communicator("plan", *p.comm, o.target.device);
  const int32_t ranks = p.comm->size();
  if (p.control) {
    check.that(p.control->size() == ranks && p.control->rank() == p.comm->rank(),
               "parallel.control", cat("rank ", p.comm->rank(), " of ", ranks, ", as comm has"),
               cat("rank ", p.control->rank(), " of ", p.control->size()));
  }
  if (p.spread == Spread::kHeads) return;
  check.that(o.mode != Mode::kSeparate || !holds_shard(p), "mode",
             "one without a gathered workspace (caches are sharded)", "kSeparate");
  if (p.spread == Spread::kContext) {
    check.that(o.heads % ranks == 0, "heads", cat("a multiple of ", ranks, " (ranks)"),
               cat(o.heads));
    return;
  }
  check.that(!o.mha, "mha", "false with kQueries", "true");
  // V4's compressor takes rows of tokens that another rank has.
  if (o.model.lists == 2)
    throw Error(ErrorCode::kUnsupported,
                "plan: parallel.spread: expected kNone, kHeads or kContext for V4, found kQueries");
}

Ranks::Ranks(const PlanOptions& o, const Choice& choice) : control_(control_of(o.parallel)) {
  if (!control_) return;
  room_.resize(parallel::agreement_bytes(control_->size()));
  parallel::Offer offer("plan");
  offer.number("winnow (hash of its version)",
               static_cast<int64_t>(hashed(std::span(std::string_view(version())), kHashBasis)));
  const Parallel& p = o.parallel;
  offer.number("parallel.comm", p.comm->size(), " ranks");
  offer.number("parallel.spread", static_cast<int64_t>(p.spread));
  offer.number("parallel.interleave", p.interleave);
  offer.number("parallel.wire", static_cast<int64_t>(p.wire));
  offer.number("parallel.sharded", p.sharded);
  offer.number("model.lists", o.model.lists);
  offer.number("format", static_cast<int64_t>(o.format));
  // Heads of a rank differ where they do not divide evenly; other spreads have all of them.
  offer.number("heads", p.spread == Spread::kHeads ? 0 : o.heads);
  offer.number("topk", o.topk);
  offer.number("extra_topk", o.extra_topk);
  offer.number("ratio", o.ratio);
  offer.number("index_heads", o.index_heads);
  offer.number("max_requests", o.max_requests);
  offer.number("max_tokens", o.max_tokens);
  offer.number("decode_threshold", o.decode_threshold);
  offer.number("uniform_decode", o.uniform_decode);
  offer.number("split", static_cast<int64_t>(o.split));
  offer.number("split_size", o.split_size);
  offer.number("precision", static_cast<int64_t>(o.precision));
  offer.number("target.device.kind", static_cast<int64_t>(o.target.device.kind));
  static constexpr const char* kNames[] = {"write",  "score",  "select", "locate",
                                           "attend", "gather", "lists"};
  static_assert(std::size(kNames) == kStages);
  for (int s = 0; s < kStages; ++s) {
    const auto stage = static_cast<Stage>(s);
    offer.kernel(kNames[s], kernel_for(choice, o, stage, o.max_tokens, false));
  }
  parallel::agree(*control_, offer, room_);
}

void Ranks::agree_on(const Batch& batch, int64_t tokens) {
  if (!control_) return;
  parallel::Offer offer("refill");
  offer.number("batch", tokens, " tokens");
  offer.number("batch", static_cast<int64_t>(batch.seq_lens.size()), " requests");
  const uint64_t hash = hashed(batch.seq_lens, hashed(batch.query_starts, kHashBasis));
  offer.number("batch (hash of its lengths)", static_cast<int64_t>(hash));
  parallel::agree(*control_, offer, room_);
}

}  // namespace winnow::internal::plan
