// Several ranks, as threads: cut against select over the whole row, cut of hostile ids against its
// reference, combine against merge, and the shares of a batch.
#include "thread_ranks.h"

#include "target.h"
#include "winnow/combine.h"
#include "winnow/cut.h"
#include "winnow/merge.h"
#include "winnow/plan.h"
#include "winnow/select.h"

namespace winnow::testing {
namespace {

using tools::ThreadRanks;

Shard shard_for(Source& s, int32_t world) {
  static const int32_t interleaves[] = {1, 2, 7, 16, 64};
  return {world, 0, interleaves[draw(s, 0, 4)]};
}

// Few distinct values, so that ties are common.
float logit(Source& s) {
  static const float special[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f};
  if (chance(s, 20)) return special[draw(s, 0, 4)];
  return chance(s, 50) ? static_cast<float>(draw(s, -2, 2)) : s.normal();
}

// What the ranks find, with every kernel and form: positions, which are one rank's, and counts.
void cut_rows(Source& s) {
  const auto world = draw32(s, 1, 4);
  const Shard shard = shard_for(s, world);
  const int64_t T = draw(s, 0, 5), N = draw(s, 0, 90), K = draw(s, 0, 24);
  const bool hostile_ids = chance(s, 30);
  std::vector<float> logits(static_cast<size_t>(T * N));
  for (float& x : logits) x = logit(s);
  // Of each rank: its part of every row, or anything at all.
  std::vector<std::vector<int32_t>> ids(world);
  std::vector<std::vector<float>> values(world);
  for (int32_t r = 0; r < world; ++r) {
    const Shard own{world, r, shard.interleave};
    const int64_t held = own.local_length(N);
    std::vector<float> part(static_cast<size_t>(T * held));
    for (int64_t t = 0; t < T; ++t)
      for (int64_t j = 0; j < held; ++j) part[t * held + j] = logits[t * N + own.global(j)];
    ids[r].resize(static_cast<size_t>(T * K));
    values[r].resize(static_cast<size_t>(T * K));
    select({.logits = tensor(part.data(), {T, held}),
            .ids = tensor(ids[r].data(), {T, K}),
            .values = tensor(values[r].data(), {T, K})});
    for (size_t i = 0; hostile_ids && i < ids[r].size(); ++i) {
      ids[r][i] = index_for(s, N, 30);
      values[r][i] = logit(s);
    }
  }
  std::vector<int32_t> want(static_cast<size_t>(T * K));
  bool known = !hostile_ids;
  if (known)
    select({.logits = tensor(logits.data(), {T, N}), .ids = tensor(want.data(), {T, K})});
  for (const Candidate& kernel : candidates("cut"))
    for (const CutForm form : {CutForm::kGather, CutForm::kOwner}) {
      ThreadRanks group(world);
      std::vector<Guarded<int32_t>> found;
      for (int32_t r = 0; r < world; ++r) found.emplace_back(T * K);
      std::vector<int64_t> kept(world);
      const auto errors = group.run([&](Communicator& comm) {
        const int32_t r = comm.rank();
        Guarded<int32_t> counts(T), own(T * K);
        cut({.comm = &comm,
             .shard = {world, r, shard.interleave},
             .ids = tensor(ids[r].data(), {T, K}),
             .values = tensor(values[r].data(), {T, K}),
             .kept = tensor(own.data(), {T, K}),
             .counts = tensor(counts.data(), {T}),
             .positions = tensor(found[r].data(), {T, K}),
             .form = form,
             .target = kernel.target()});
        for (const int32_t c : counts) kept[r] += c;
      });
      EXPECT_EQ(errors, std::vector<std::string>(world)) << kernel.name;
      if (!known) want = found[0].values();  // the reference comes first
      known = true;
      int64_t all = 0, members = 0;
      for (int32_t r = 0; r < world; ++r) {
        EXPECT_EQ(found[r].values(), want) << kernel.name << ", rank " << r;
        all += kept[r];
      }
      for (const int32_t id : want) members += id >= 0;
      // An id that a hostile caller names twice may be kept twice.
      if (!hostile_ids) {
        EXPECT_EQ(all, members) << kernel.name;
      }
    }
}

void combine_parts(Source& s) {
  const auto world = draw32(s, 1, 4);
  const int64_t T = draw(s, 0, 3), own = draw(s, 1, 3), H = own * world, d = draw(s, 0, 20);
  Guarded<float> out(world * T * H * d), lse(world * T * H), sink(H);
  for (float& x : out) x = s.normal();
  for (float& x : lse) x = chance(s, 15) ? INFINITY : chance(s, 15) ? -INFINITY : 9 * s.normal();
  for (float& x : sink) x = chance(s, 10) ? -INFINITY : s.normal();
  ThreadRanks group(world);
  const auto errors = group.run([&](Communicator& comm) {
    const int64_t r = comm.rank();
    std::vector<bf16> got(T * own * d), want(T * own * d);
    std::vector<float> got_lse(T * own), want_lse(T * own);
    const Tensor sinks = tensor(sink.data() + r * own, {own});
    combine({.comm = &comm,
             .partial_out = tensor(out.data() + r * T * H * d, {T, H, d}),
             .partial_lse = tensor(lse.data() + r * T * H, {T, H}),
             .sink = sinks,
             .out = tensor(got.data(), {T, own, d}),
             .lse = tensor(got_lse.data(), {T, own})});
    merge({.partial_out = tensor(out.data() + r * own * d, {world, T, own, d},
                                 {T * H * d, H * d, d, 1}),
           .partial_lse = tensor(lse.data() + r * own, {world, T, own}, {T * H, H, 1}),
           .sink = sinks,
           .out = tensor(want.data(), {T, own, d}),
           .lse = tensor(want_lse.data(), {T, own})});
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i].bits, want[i].bits);
    EXPECT_EQ(got_lse, want_lse);
  });
  EXPECT_EQ(errors, std::vector<std::string>(world));
}

// Every token that is not padding is in one share, at its position.
void share_batch(Source& s) {
  const Shard shard = shard_for(s, draw32(s, 1, 9));
  std::vector<int32_t> starts = {0}, lens, where;
  for (int64_t r = draw(s, 0, 5); r > 0; --r) {
    const auto query = draw32(s, 0, 40), seq = chance(s, 15) ? 0 : query + draw32(s, 0, 200);
    starts.push_back(starts.back() + query);
    lens.push_back(seq);
    for (int32_t i = 0; i < query; ++i) where.push_back(seq == 0 ? -1 : seq - query + i);
  }
  std::vector<int32_t> found(where.size(), -1);
  for (int32_t r = 0; r < shard.world; ++r) {
    const BatchShare share = shard_batch({starts, lens}, {shard.world, r, shard.interleave});
    ASSERT_EQ(share.query_starts.size(), starts.size());
    ASSERT_EQ(share.query_starts.back(), static_cast<int32_t>(share.tokens.size()));
    for (size_t q = 0; q < lens.size(); ++q)
      for (int32_t i = share.query_starts[q]; i < share.query_starts[q + 1]; ++i) {
        const int32_t t = share.tokens[i];
        ASSERT_TRUE(t >= starts[q] && t < starts[q + 1]);
        ASSERT_EQ(found[t], -1);
        ASSERT_TRUE(share.positions[i] < share.seq_lens[q] && share.seq_lens[q] <= lens[q]);
        found[t] = share.positions[i];
      }
  }
  EXPECT_EQ(found, where);
}

void run(Source& s) {
  if (compared != Compared::kCpu) return;  // ranks of a device have tests of their own
  const int64_t kind = draw(s, 0, 9);
  if (kind < 5) cut_rows(s);
  else if (kind < 8) combine_parts(s);
  else share_batch(s);
}

const FuzzTarget ranks_target{"ranks", 10, run};

}  // namespace
}  // namespace winnow::testing
