// The tile schedule: coverage, balance and invariance over drawn shapes, and small cases by hand.
#include "core/schedule.h"

#include <algorithm>

#include "testing.h"

namespace winnow::internal::core {
namespace {

using testing::draw;
using testing::Guarded;

struct Made {
  Guarded<Tile> tiles;
  Guarded<int32_t> worker_starts, split_starts;
  Schedule schedule;

  Made(const ScheduleShape& s, const std::vector<int32_t>& ends)
      : tiles(max_tiles(s)), worker_starts(s.workers + 1), split_starts(s.tokens + 1) {
    schedule = make_schedule(s, ends,
                             {{tiles.data(), tiles.size()},
                              {worker_starts.data(), worker_starts.size()},
                              {split_starts.data(), split_starts.size()}});
  }
  std::vector<Tile> list() const {
    return std::vector<Tile>(schedule.tiles.begin(), schedule.tiles.end());
  }
  std::vector<int32_t> workers() const {
    return {schedule.worker_starts.begin(), schedule.worker_starts.end()};
  }
};

int64_t blocks_of(const ScheduleShape& s, int32_t end) {
  const int32_t e = std::max(end, 0);
  return (std::min(s.widths[0], e) + std::min(s.widths[1], e / s.ratio) + kScheduleBlock - 1) /
         kScheduleBlock;
}

// Tiles cover each token's columns exactly once, in order, and the two indices agree with them.
void expect_cover(const ScheduleShape& s, const Schedule& m) {
  ASSERT_EQ(m.split_starts.size(), static_cast<size_t>(s.tokens + 1));
  ASSERT_EQ(m.worker_starts.size(), static_cast<size_t>(s.workers + 1));
  EXPECT_TRUE(std::is_sorted(m.worker_starts.begin(), m.worker_starts.end()));
  EXPECT_EQ(m.worker_starts.front(), 0);
  EXPECT_EQ(m.worker_starts.back(), static_cast<int32_t>(m.tiles.size()));
  EXPECT_EQ(m.split_starts.back(), static_cast<int32_t>(m.tiles.size()));
  size_t i = 0;
  for (int32_t t = 0; t < s.tokens; ++t) {
    EXPECT_EQ(m.split_starts[t], static_cast<int32_t>(i));
    int32_t begin = 0, split = 0;
    do {
      ASSERT_LT(i, m.tiles.size());
      EXPECT_EQ(m.tiles[i].token, t);
      EXPECT_EQ(m.tiles[i].begin, begin);
      EXPECT_EQ(m.tiles[i].split, split++);
      EXPECT_TRUE(m.tiles[i].end > begin || s.widths[0] + s.widths[1] == 0);
      begin = m.tiles[i++].end;
    } while (begin < s.widths[0] + s.widths[1]);
    EXPECT_EQ(begin, s.widths[0] + s.widths[1]);
  }
  EXPECT_EQ(i, m.tiles.size());
}

std::vector<int32_t> draw_ends(testing::Rng& rng, int64_t tokens) {
  std::vector<int32_t> ends(tokens);
  const int64_t longest = int64_t{1} << draw(rng, 0, 13);
  for (int32_t& e : ends)
    e = draw(rng, 0, 9) == 0 ? 0 : static_cast<int32_t>(draw(rng, 1, longest));
  return ends;
}

ScheduleShape draw_shape(testing::Rng& rng) {
  ScheduleShape s;
  s.tokens = draw(rng, 0, 3) == 0 ? draw(rng, 0, 3) : draw(rng, 0, 300);
  s.widths[0] = static_cast<int32_t>(draw(rng, 0, 2100));
  if (draw(rng, 0, 1)) s.widths[1] = static_cast<int32_t>(draw(rng, 0, 1100));
  s.ratio = draw(rng, 0, 1) ? 4 : 1;
  s.workers = static_cast<int32_t>(draw(rng, 1, 70));
  return s;
}

TEST(Schedule, BalancedCoversEvenly) {
  testing::Rng rng(1);
  for (int round = 0; round < 400; ++round) {
    const ScheduleShape s = draw_shape(rng);
    const std::vector<int32_t> ends = draw_ends(rng, s.tokens);
    const Made m(s, ends);
    expect_cover(s, m.schedule);
    int64_t total = 0;
    for (int32_t e : ends) total += blocks_of(s, e);
    const int64_t mean = total / s.workers, bound = mean + 1 + mean / 8;
    for (int32_t w = 0; w < s.workers; ++w) {
      int64_t load = 0;
      for (int32_t i = m.worker_starts[w]; i < m.worker_starts[w + 1]; ++i) {
        const Tile& tile = m.tiles[i];
        EXPECT_EQ(tile.begin % kScheduleBlock, 0);
        const int64_t work = blocks_of(s, ends[tile.token]);
        load +=
            std::clamp<int64_t>(tile.end / kScheduleBlock, 0, work) - tile.begin / kScheduleBlock;
        if (tile.end % kScheduleBlock != 0 && tile.end / kScheduleBlock < work)
          ++load;  // the last, partial block
      }
      EXPECT_LE(load, bound) << "worker " << w << " of " << s.workers << ", total " << total;
    }
  }
}

TEST(Schedule, WholeTokensWhenThereAreMany) {
  // 33 tokens of 32 blocks on 2 workers: the boundary is half a token from an edge, 3 % of a share.
  const ScheduleShape s{.tokens = 33, .widths = {2048, 0}, .workers = 2};
  const Made m(s, {});
  EXPECT_EQ(m.schedule.tiles.size(), 33u);
  // One token on 8 workers: eight tiles of four blocks.
  const Made one({.tokens = 1, .widths = {2048, 0}, .workers = 8}, {});
  std::vector<Tile> want;
  for (int32_t i = 0; i < 8; ++i) want.push_back({0, 256 * i, 256 * (i + 1), i});
  EXPECT_EQ(one.list(), want);
  EXPECT_EQ(one.workers(), (std::vector<int32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8}));
}

TEST(Schedule, LastTileReachesTheFullWidth) {
  // Estimates of 100 and 0 columns: the lists may hold entries anywhere all the same.
  const Made m({.tokens = 2, .widths = {512, 128}, .workers = 2}, {100, 0});
  EXPECT_EQ(m.list(), (std::vector<Tile>{{0, 0, 128, 0}, {0, 128, 640, 1}, {1, 0, 640, 0}}));
}

TEST(Schedule, PaddingCostsNothing) {
  // Two real tokens before 62 padded ones (a captured graph's batch): one real token per worker.
  std::vector<int32_t> ends(64, 0);
  ends[0] = ends[1] = 5000;
  const Made m({.tokens = 64, .widths = {2048, 0}, .workers = 2}, ends);
  EXPECT_EQ(m.workers(), (std::vector<int32_t>{0, 1, 64}));
  // Nothing but padding is shared out by token; no columns still give a tile per token.
  const Made idle({.tokens = 64, .widths = {2048, 0}, .workers = 2}, std::vector<int32_t>(64, 0));
  EXPECT_EQ(idle.workers(), (std::vector<int32_t>{0, 32, 64}));
  const Made none({.tokens = 3, .workers = 1}, {});
  EXPECT_EQ(none.list(), (std::vector<Tile>{{0, 0, 0, 0}, {1, 0, 0, 0}, {2, 0, 0, 0}}));
}

TEST(Schedule, MoreWorkersThanBlocks) {
  const Made m({.tokens = 1, .widths = {130, 0}, .workers = 16}, {});
  EXPECT_EQ(m.list(), (std::vector<Tile>{{0, 0, 64, 0}, {0, 64, 128, 1}, {0, 128, 130, 2}}));
}

TEST(Schedule, FixedCutsDependOnTheShapeAlone) {
  testing::Rng rng(2);
  for (int round = 0; round < 200; ++round) {
    ScheduleShape s = draw_shape(rng);
    s.split = SplitPolicy::kFixed;
    s.split_size = static_cast<int32_t>(draw(rng, 1, 3) == 1 ? draw(rng, 50, 700) : 256);
    const std::vector<int32_t> ends = draw_ends(rng, s.tokens);
    const Made m(s, ends);
    expect_cover(s, m.schedule);
    for (const Tile& tile : m.schedule.tiles) {
      EXPECT_EQ(tile.begin, tile.split * s.split_size);
      EXPECT_LE(tile.end - tile.begin, s.split_size);
    }
    // The same tokens in another order, and on another number of workers: the same cuts.
    std::vector<int32_t> shuffled = ends;
    std::shuffle(shuffled.begin(), shuffled.end(), rng);
    s.workers = static_cast<int32_t>(draw(rng, 1, 70));
    const Made other(s, shuffled);
    EXPECT_EQ(m.list(), other.list());
  }
}

TEST(Schedule, FixedIsShared) {
  // 64 tokens of 4 tiles on 4 workers: 16 whole tokens each.
  const Made m({.tokens = 64,
                .widths = {2048, 0},
                .workers = 4,
                .split = SplitPolicy::kFixed,
                .split_size = 512},
               std::vector<int32_t>(64, 9999));
  EXPECT_EQ(m.workers(), (std::vector<int32_t>{0, 64, 128, 192, 256}));
  // One token of 4 tiles on 2 workers: two tiles each.
  const Made one({.tokens = 1,
                  .widths = {2048, 0},
                  .workers = 2,
                  .split = SplitPolicy::kFixed,
                  .split_size = 512},
                 {});
  EXPECT_EQ(one.workers(), (std::vector<int32_t>{0, 2, 4}));
}

}  // namespace
}  // namespace winnow::internal::core
