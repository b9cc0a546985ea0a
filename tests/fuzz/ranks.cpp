// cut and combine over ranks that are threads. cut: the ids of select() over the whole row; where
// some are missing, the same from every kernel. combine: bit for bit merge() of the parts.
#include <memory>

#include "target.h"
#include "thread_ranks.h"
#include "winnow/combine.h"
#include "winnow/cut.h"
#include "winnow/merge.h"
#include "winnow/select.h"

namespace winnow::testing {
namespace {

// Runs the body on every rank: no error.
template <class F>
void on_ranks(int32_t ranks, const F& body) {
  tools::ThreadRanks group(ranks);
  for (const std::string& error : group.run(body)) EXPECT_EQ(error, "");
}

// What a rank brings to a cut and what it gets.
struct Share {
  Guarded<int32_t> ids, kept, counts, positions;
  Guarded<float> values;

  Share(int64_t T, int64_t K)
      : ids(T * K, 0xff), kept(T * K), counts(T), positions(T * K), values(T * K) {}
};

struct CutProblem {
  int32_t ranks, interleave;
  int64_t T, N, K;
  CutForm form;
  Guarded<float> logits;
  std::vector<std::unique_ptr<Share>> shares;

  explicit CutProblem(Source& s)
      : ranks(draw32(s, 1, 3)),
        interleave(draw32(s, 1, 5)),
        T(draw(s, 0, 4)),
        N(draw(s, 0, 30)),
        K(draw(s, 0, 9)),
        form(static_cast<CutForm>(draw(s, 0, 2))),
        logits(T * N) {
    static const float special[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f};
    for (float& x : logits)
      x = chance(s, 20) ? special[draw(s, 0, 4)] : static_cast<float>(draw(s, -3, 3));
    for (int32_t r = 0; r < ranks; ++r) {
      shares.push_back(std::make_unique<Share>(T, K));
      const Shard shard = shard_of(r);
      const int64_t own = shard.local_length(N);
      Guarded<float> part(T * own);
      for (int64_t i = 0; i < T * own; ++i) part[i] = logits[i / own * N + shard.global(i % own)];
      select({.logits = tensor(part.data(), {T, own}),
              .ids = tensor(shares[r]->ids.data(), {T, K}),
              .values = tensor(shares[r]->values.data(), {T, K}),
              .target = {.kernel = "reference"}});
    }
  }
  Shard shard_of(int32_t rank) const { return {ranks, rank, interleave}; }

  void run(const Candidate& kernel) {
    on_ranks(ranks, [&](Communicator& comm) {
      Share& own = *shares[comm.rank()];
      own.kept.poison();
      own.counts.poison();
      own.positions.poison();
      cut({.comm = &comm,
           .shard = shard_of(comm.rank()),
           .ids = tensor(own.ids.data(), {T, K}),
           .values = tensor(own.values.data(), {T, K}),
           .kept = tensor(own.kept.data(), {T, K}),
           .counts = tensor(own.counts.data(), {T}),
           .positions = tensor(own.positions.data(), {T, K}),
           .form = form,
           .target = kernel.target()});
    });
  }
  // Every rank's outputs, a rank behind the other.
  std::vector<int32_t> results() const {
    std::vector<int32_t> all;
    for (const auto& share : shares)
      for (Guarded<int32_t>* part : {&share->kept, &share->counts, &share->positions})
        all.insert(all.end(), part->begin(), part->end());
    return all;
  }
};

void cut_any(Source& s) {
  CutProblem p(s);
  Guarded<int32_t> want(p.T * p.K);
  select({.logits = tensor(p.logits.data(), {p.T, p.N}),
          .ids = tensor(want.data(), {p.T, p.K}),
          .target = {.kernel = "reference"}});
  // Ids that are no candidates: every kernel leaves them out. Ids that stand in a row twice: what
  // they give is not promised, but it stays in the outputs.
  const bool missing = chance(s, 20), hostile = chance(s, 20);
  for (const auto& share : p.shares)
    for (int32_t& id : share->ids) {
      if (missing && chance(s, 20)) id = draw32(s, INT32_MIN, -1);
      if (hostile && chance(s, 20)) id = index_for(s, p.N, 100);
    }
  std::vector<int32_t> first;
  for (const Candidate& kernel : candidates("cut")) {
    p.run(kernel);
    if (hostile) continue;
    const std::vector<int32_t> got = p.results();
    if (kernel.name == "reference") first = got;
    EXPECT_EQ(got, first) << "cut: " << kernel.name;
    for (const auto& share : p.shares)
      if (!missing)
        expect_same(share->positions, want.values(), "cut: positions of " + kernel.name);
  }
}

void combine_any(Source& s) {
  const int32_t ranks = draw32(s, 1, 3);
  const int64_t T = draw(s, 0, 3), own = draw(s, 1, 2), H = own * ranks, d_v = draw(s, 1, 20);
  const Wire wire = chance(s, 50) ? Wire::kF32 : Wire::kBf16;
  const bool with_sink = chance(s, 50);
  Guarded<float> parts(ranks * T * H * d_v), lse(ranks * T * H), sink(H);
  for (float& x : parts) x = s.normal();
  for (float& x : lse) x = chance(s, 15) ? INFINITY : chance(s, 15) ? -INFINITY : 20 * s.normal();
  for (float& x : sink) x = chance(s, 10) ? -INFINITY : s.normal();
  Guarded<bf16> rounded(ranks * T * H * d_v);
  for (size_t i = 0; i < parts.size(); ++i) rounded[i] = to_bf16(parts[i]);
  const bool narrow = wire == Wire::kBf16 && ranks > 1;
  for (const Candidate& kernel : candidates("merge")) {
    Guarded<float> got(ranks * T * own * d_v), want(ranks * T * own * d_v);
    Guarded<float> got_lse(ranks * T * own), want_lse(ranks * T * own);
    const auto result = [&](Guarded<float>& all, int32_t r) {
      return tensor(all.data() + r * T * own * d_v, {T, own, d_v});
    };
    const auto result_lse = [&](Guarded<float>& all, int32_t r) {
      return tensor(all.data() + r * T * own, {T, own});
    };
    on_ranks(ranks, [&](Communicator& comm) {
      const int32_t r = comm.rank();
      CombineArgs a{.comm = &comm,
                    .wire = wire,
                    .partial_out = tensor(parts.data() + r * T * H * d_v, {T, H, d_v}),
                    .partial_lse = tensor(lse.data() + r * T * H, {T, H}),
                    .out = result(got, r),
                    .lse = result_lse(got_lse, r),
                    .target = kernel.target()};
      if (with_sink) a.sink = tensor(sink.data() + r * own, {own});
      combine(a);
    });
    for (int32_t r = 0; r < ranks; ++r) {
      const int64_t first = r * own;
      const std::initializer_list<int64_t> shape = {ranks, T, own, d_v};
      const std::initializer_list<int64_t> stride = {T * H * d_v, H * d_v, d_v, 1};
      MergeArgs a{.partial_out = narrow ? tensor(rounded.data() + first * d_v, shape, stride)
                                        : tensor(parts.data() + first * d_v, shape, stride),
                  .partial_lse = tensor(lse.data() + first, {ranks, T, own}, {T * H, H, 1}),
                  .out = result(want, r),
                  .lse = result_lse(want_lse, r),
                  .target = kernel.target()};
      if (with_sink) a.sink = tensor(sink.data() + first, {own});
      merge(a);
    }
    expect_same(got, want.values(), "combine: " + kernel.name);
    expect_same(got_lse, want_lse.values(), "combine, lse: " + kernel.name);
  }
}

void run(Source& s) { chance(s, 60) ? cut_any(s) : combine_any(s); }

const FuzzTarget ranks_target{"ranks", 1, run};

}  // namespace
}  // namespace winnow::testing
