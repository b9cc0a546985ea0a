// shard_batch: every token that is not padding is in one rank's share of a batch, at its position.
#include "target.h"
#include "winnow/plan.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  static const int32_t interleaves[] = {1, 2, 7, 16, 64};
  const Shard shard{draw32(s, 1, 9), 0, interleaves[draw(s, 0, 4)]};
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

const FuzzTarget shares_target{"shares", 10, run};

}  // namespace
}  // namespace winnow::testing
