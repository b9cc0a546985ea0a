// cut: the ids of one rank, bit for bit, over every number of ranks, interleave, form and kernel,
// for rows of logits and through every score kernel; bytes as the header says; refusals.
#include "winnow/cut.h"

#include <cmath>
#include <limits>

#include "core/formats.h"
#include "device_ranks.h"
#include "testing.h"
#include "winnow/score.h"
#include "winnow/select.h"

namespace winnow {
namespace {

using testing::DeviceRanks;
using testing::draw;
using testing::Guarded;
using tools::ThreadRanks;

constexpr int32_t kRanks[] = {1, 2, 3, 4, 8};
constexpr int32_t kInterleaves[] = {1, 7, 64};

// What a rank gave.
struct Result {
  std::vector<int32_t> kept, counts, positions;
};

// Rows of logits whose columns are spread over ranks.
struct Rows {
  int64_t tokens, columns, topk;
  bool positions = true;  // requested; without them Hopper finds the cuts in clusters
  testing::MappedVector<float> logits;

  Rows(testing::Rng& rng, int64_t tokens_, int64_t columns_, int64_t topk_)
      : tokens(tokens_), columns(columns_), topk(topk_), logits(tokens * columns) {
    constexpr float kInf = std::numeric_limits<float>::infinity();
    const float special[] = {std::nanf(""), -kInf, kInf, 0.0f, -0.0f, 1.0f};
    const int64_t kind = draw(rng, 0, 4);
    for (float& x : logits) {
      if (kind == 0) x = testing::normal(rng);
      else if (kind == 1) x = static_cast<float>(draw(rng, 0, 2));
      else if (kind == 2) x = 0.5f;
      else if (kind == 4) x = std::floor(15 * testing::normal(rng));
      else x = special[draw(rng, 0, 5)];
    }
  }

  std::vector<int32_t> whole(const std::string& kernel) {
    Guarded<int32_t> ids(tokens * topk);
    select({.logits = tensor(logits.data(), {tokens, columns}),
            .ids = tensor(ids.data(), {tokens, topk}),
            .target = testing::target("select", kernel)});
    EXPECT_TRUE(testing::device_finished());
    return ids.values();
  }

  // select() over this rank's columns, then cut().
  Result over_ranks(Communicator& comm, int32_t interleave, CutForm form,
                    const std::string& select_kernel, const std::string& cut_kernel) const {
    const Shard shard{comm.size(), comm.rank(), interleave};
    const int64_t own = shard.local_length(columns);
    Target selects = testing::target("select", select_kernel);
    Target cuts = testing::target("cut", cut_kernel);
    const testing::OwnDevice device(cuts.device.kind);
    selects.device = cuts.device = device.get();
    testing::MappedVector<float> part(tokens * own);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t j = 0; j < own; ++j) part[t * own + j] = logits[t * columns + shard.global(j)];
    Guarded<int32_t> ids(tokens * topk), counts(tokens), places(tokens * topk);
    Guarded<float> values(tokens * topk);
    const std::initializer_list<int64_t> shape = {tokens, topk};
    select({.logits = tensor(part.data(), {tokens, own}),
            .ids = tensor(ids.data(), shape),
            .values = tensor(values.data(), shape),
            .target = selects});
    CutArgs args{.comm = &comm,
                 .shard = shard,
                 .ids = tensor(ids.data(), shape),
                 .values = tensor(values.data(), shape),
                 .kept = tensor(ids.data(), shape),
                 .counts = tensor(counts.data(), {tokens}),
                 .positions = positions ? tensor(places.data(), shape) : Tensor{},
                 .form = form,
                 .target = cuts};
    const testing::DeviceWorkspace workspace(cuts.device, cut_workspace_bytes(args));
    args.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
    cut(args);
    EXPECT_TRUE(testing::stream_finished(cuts.device));
    if (!positions) return {ids.values(), counts.values(), {}};
    return {ids.values(), counts.values(), places.values()};
  }
};

// Every rank has the row's ids, where it requested them, and keeps those that it owns.
void expect_ids(const std::vector<int32_t>& want, int64_t tokens, int64_t topk, Shard shard,
                const Result& got) {
  if (!got.positions.empty()) {
    EXPECT_EQ(got.positions, want);
  }
  for (int64_t t = 0; t < tokens; ++t) {
    std::vector<int32_t> own;
    for (int64_t k = 0; k < topk; ++k)
      if (const int32_t id = want[t * topk + k]; id >= 0 && shard.owns(id))
        own.push_back(static_cast<int32_t>(shard.local(id)));
    EXPECT_EQ(got.counts[t], static_cast<int32_t>(own.size())) << "token " << t;
    own.resize(topk, -1);
    const auto row = got.kept.begin() + t * topk;
    EXPECT_EQ(std::vector<int32_t>(row, row + topk), own) << "token " << t;
  }
}

// A kernel of cut, one of select on the same device, the number of ranks.
using Kernels = std::tuple<std::string, std::string, int32_t>;

class CutTest : public ::testing::TestWithParam<Kernels> {
 protected:
  void SetUp() override {
    if (const std::string why = testing::why_not("cut", std::get<0>(GetParam())); !why.empty())
      GTEST_SKIP() << why;
  }
  // In every form.
  void expect_ids_of_one_rank(Rows& rows, int32_t interleave) {
    const auto& [cut_kernel, select_kernel, ranks] = GetParam();
    const std::vector<int32_t> want = rows.whole(select_kernel);
    for (const CutForm form : {CutForm::kAuto, CutForm::kGather, CutForm::kOwner}) {
      DeviceRanks group(ranks);
      std::vector<Result> results(ranks);
      const auto errors = group.run([&](Communicator& comm) {
        results[comm.rank()] = rows.over_ranks(comm, interleave, form, select_kernel, cut_kernel);
      });
      for (int32_t r = 0; r < ranks; ++r) {
        ASSERT_EQ(errors[r], "");
        expect_ids(want, rows.tokens, rows.topk, {ranks, r, interleave}, results[r]);
      }
    }
  }
};

TEST_P(CutTest, GivesTheIdsOfOneRank) {
  const int32_t ranks = std::get<2>(GetParam());
  testing::Rng rng(ranks);
  const int64_t tokens[] = {0, 1, ranks - 1, ranks, 33};
  for (int round = 0; round < 60; ++round) {
    const int64_t topks[] = {1, 5, 64, 128, 300};
    Rows rows(rng, tokens[round % 5], draw(rng, 0, 400), topks[draw(rng, 0, 4)]);
    rows.positions = round % 3 > 0;
    const int32_t interleave = kInterleaves[draw(rng, 0, 2)];
    expect_ids_of_one_rank(rows, interleave);
    if (HasFailure()) FAIL() << "round " << round << ", interleave " << interleave;
  }
}

// The sizes of the models: most rows are found by bins, those of ties by digits.
TEST_P(CutTest, GivesTheIdsOfLongRows) {
  const auto& [cut_kernel, select_kernel, ranks] = GetParam();
  if (cut_kernel == "reference" || select_kernel == "reference") GTEST_SKIP() << "slow";
  testing::Rng rng(100 + ranks);
  for (int round = 0; round < 12; ++round) {
    const int64_t topk = round % 2 ? 512 : 2048;
    Rows rows(rng, draw(rng, 1, 5), draw(rng, 1000, 40000), topk);
    rows.positions = round % 4 == 0;
    expect_ids_of_one_rank(rows, kInterleaves[round % 3]);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

std::vector<Kernels> kernel_pairs() {
  std::vector<Kernels> pairs;
  for (const std::string& cut_kernel : testing::kernels("cut"))
    for (const std::string& select_kernel : testing::kernels("select"))
      for (const int32_t ranks : kRanks)
        if (testing::target("cut", cut_kernel).device.kind ==
            testing::target("select", select_kernel).device.kind)
          pairs.emplace_back(cut_kernel, select_kernel, ranks);
  return pairs;
}

INSTANTIATE_TEST_SUITE_P(Kernels, CutTest, ::testing::ValuesIn(kernel_pairs()),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_select_" + std::get<1>(info.param) +
                                  "_ranks_" + std::to_string(std::get<2>(info.param));
                         });

// Index keys whose rows are spread over ranks.
class CutScores : public ::testing::TestWithParam<std::string> {};

TEST_P(CutScores, GivesTheIdsOfOneRank) {
  const std::string& kernel = GetParam();
  if (const std::string why = testing::why_not("score", kernel); !why.empty()) GTEST_SKIP() << why;
  constexpr int64_t kTokens = 5, kHeads = 3, kKeys = 501, kTopk = 64, kDim = 128;
  testing::Rng rng(17);
  const auto bytes = [&](int64_t n) {
    testing::MappedVector<e4m3> x(n);
    for (e4m3& v : x) v = to_e4m3(testing::normal(rng));
    return x;
  };
  const testing::MappedVector<e4m3> q = bytes(kTokens * kHeads * kDim);
  testing::MappedVector<e4m3> keys = bytes(kKeys * kDim);
  // Every third key is the one before it: ties.
  for (int64_t j = 2; j < kKeys; j += 3)
    std::copy_n(keys.begin() + (j - 1) * kDim, kDim, keys.begin() + j * kDim);
  testing::MappedVector<float> weights(kTokens * kHeads), scales(kKeys, 0.25f);
  for (float& w : weights) w = testing::normal(rng);
  const std::vector<int32_t> ends = {kKeys, 0, 40, 300, 77};

  const auto run = [&](Communicator* comm, const Shard& shard) {
    Target target = testing::target("score", kernel);
    const testing::OwnDevice device(target.device.kind);
    target.device = device.get();
    testing::MappedVector<e4m3> own_keys;
    testing::MappedVector<float> own_scales;
    for (int64_t j = 0; j < kKeys; ++j) {
      if (!shard.owns(j)) continue;
      own_keys.insert(own_keys.end(), keys.begin() + j * kDim, keys.begin() + (j + 1) * kDim);
      own_scales.push_back(scales[j]);
    }
    const auto rows = static_cast<int64_t>(own_scales.size());
    testing::MappedVector<int32_t> own_ends(kTokens), ids(kTokens * kTopk);
    testing::MappedVector<int32_t> positions(kTokens * kTopk);
    testing::MappedVector<float> values(kTokens * kTopk);
    for (int64_t t = 0; t < kTokens; ++t)
      own_ends[t] = static_cast<int32_t>(shard.local_length(ends[t]));
    ScoreSelectArgs scores{.score = {.q = tensor(q.data(), {kTokens, kHeads, kDim}),
                                     .weights = tensor(weights.data(), {kTokens, kHeads}),
                                     .key_rows = tensor(own_keys.data(), {rows, kDim}),
                                     .key_scales = tensor(own_scales.data(), {rows}),
                                     .ends = tensor(own_ends.data(), {kTokens}),
                                     .target = target},
                           .ids = tensor(ids.data(), {kTokens, kTopk}),
                           .values = tensor(values.data(), {kTokens, kTopk})};
    const testing::DeviceWorkspace for_scores(target.device, score_select_workspace_bytes(scores));
    scores.workspace = {static_cast<std::byte*>(for_scores.data()), for_scores.size()};
    score_select(scores);
    CutArgs cuts{.comm = comm,
                 .shard = shard,
                 .ids = tensor(ids.data(), {kTokens, kTopk}),
                 .values = tensor(values.data(), {kTokens, kTopk}),
                 .positions = tensor(positions.data(), {kTokens, kTopk}),
                 .target = {.device = target.device}};
    const testing::DeviceWorkspace for_cuts(target.device, cut_workspace_bytes(cuts));
    cuts.workspace = {static_cast<std::byte*>(for_cuts.data()), for_cuts.size()};
    cut(cuts);
    EXPECT_TRUE(testing::stream_finished(target.device));
    return std::vector<int32_t>(positions.begin(), positions.end());
  };
  const std::vector<int32_t> want = run(nullptr, {});
  for (const int32_t ranks : kRanks)
    for (const int32_t interleave : kInterleaves) {
      DeviceRanks group(ranks);
      const auto errors = group.run([&](Communicator& comm) {
        const auto got = run(&comm, {ranks, comm.rank(), interleave});
        EXPECT_EQ(got, want) << ranks << " ranks, interleave " << interleave;
      });
      EXPECT_EQ(errors, std::vector<std::string>(ranks));
    }
}

INSTANTIATE_TEST_SUITE_P(Kernels, CutScores, ::testing::ValuesIn(testing::kernels("score")),
                         [](const auto& info) { return info.param; });

// Volumes of <winnow/cut.h>, with rows rounded up to a multiple of the ranks in the owner's form.
TEST(Cut, MovesWhatTheHeaderSays) {
  constexpr int32_t kWorld = 4;
  constexpr int64_t kTopk = 32;
  testing::Rng rng(3);
  for (const int64_t tokens : {0, 1, 3, 4, 9}) {
    const Rows rows(rng, tokens, 100, kTopk);
    const int64_t each = (tokens + kWorld - 1) / kWorld;
    for (const CutForm form : {CutForm::kGather, CutForm::kOwner}) {
      ThreadRanks group(kWorld);
      const auto errors =
          group.run([&](Communicator& comm) { rows.over_ranks(comm, 1, form, "simd", "simd"); });
      EXPECT_EQ(errors, std::vector<std::string>(kWorld));
      ThreadRanks::Counted want{.exchanges = 1};
      if (tokens > 0 && form == CutForm::kGather) {
        want.gathers = 1;
        want.gathered_bytes = 8 * kTopk * (kWorld - 1) * tokens;
      } else if (tokens > 0) {
        want.all_to_alls = 1;
        want.all_to_all_bytes = 8 * kTopk * (kWorld - 1) * each;
        want.gathers = 2;  // cuts and positions: both are requested
        want.gathered_bytes = (8 + 4 * kTopk) * (kWorld - 1) * each;
      }
      for (int32_t r = 0; r < kWorld; ++r) EXPECT_EQ(group.counted(r), want) << tokens;
    }
  }
}

TEST(Cut, HostileIdsAreNoCandidates) {
  // Positions beyond 32 bits, negative ids, the same id again: each rank writes its own rows alone.
  ThreadRanks group(2);
  const auto errors = group.run([](Communicator& comm) {
    Guarded<int32_t> ids(std::vector<int32_t>{INT32_MIN, INT32_MAX, -2, 3, 3, 0});
    Guarded<float> values(std::vector<float>{9, 9, 9, 1, 1, 2});
    Guarded<int32_t> positions(6), counts(1);
    cut({.comm = &comm,
         .shard = {2, comm.rank(), 1},
         .ids = tensor(ids.data(), {1, 6}),
         .values = tensor(values.data(), {1, 6}),
         .kept = tensor(ids.data(), {1, 6}),
         .counts = tensor(counts.data(), {1}),
         .positions = tensor(positions.data(), {1, 6})});
    EXPECT_EQ(counts[0], 3);
    EXPECT_EQ(ids.values(), (std::vector<int32_t>{3, 3, 0, -1, -1, -1}));
    EXPECT_EQ(positions.values(), (std::vector<int32_t>{0, 1, 6, 6, 7, 7}));
  });
  EXPECT_EQ(errors, std::vector<std::string>(2));
}

// A call that differs on one rank ends on all of them, with one text.
TEST(Cut, RanksThatDifferAreNamed) {
  struct Fault {
    const char* name;
    void (*change)(CutArgs&);
    std::vector<const char*> words;
  };
  const Fault faults[] = {
      {"rows",
       [](CutArgs& a) { a.ids.shape[0] = a.values.shape[0] = a.positions.shape[0] = 2; },
       {"cut: ids", "3 tokens as rank 0 has", "2 on rank 1"}},
      {"form", [](CutArgs& a) { a.form = CutForm::kOwner; }, {"cut: form", "rank 1"}},
      {"refused", [](CutArgs& a) { a.values.dtype = DType::kI32; }, {"cut", "values"}},
      {"shard", [](CutArgs& a) { a.shard.rank = 0; }, {"cut", "shard.rank"}},
  };
  for (const Fault& fault : faults) {
    ThreadRanks group(3);
    const auto errors = group.run([&](Communicator& comm) {
      std::vector<int32_t> ids(12, -1), positions(12);
      std::vector<float> values(12);
      CutArgs a{.comm = &comm,
                .shard = {3, comm.rank(), 1},
                .ids = tensor(ids.data(), {3, 4}),
                .values = tensor(values.data(), {3, 4}),
                .positions = tensor(positions.data(), {3, 4}),
                .form = CutForm::kGather};
      if (comm.rank() == 1) fault.change(a);
      cut(a);
    });
    for (const std::string& e : errors)
      for (const char* word : fault.words)
        EXPECT_NE(e.find(word), std::string::npos) << fault.name << ": '" << word << "' in " << e;
    EXPECT_EQ(errors[0], errors[2]);
  }
}

TEST(CutErrors, NameTheArgument) {
  std::vector<int32_t> ids(12), kept(12);
  std::vector<float> values(12);
  const CutArgs good{.ids = tensor(ids.data(), {3, 4}),
                     .values = tensor(values.data(), {3, 4}),
                     .kept = tensor(kept.data(), {3, 4})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    CutArgs a = good;
    change(a);
    testing::expect_error([&] { cut(a); }, code, words);
  };
  expect([](CutArgs& a) { a.ids = {}; }, {"cut", "ids", "nothing"});
  expect([](CutArgs& a) { a.values.shape[1] = 3; }, {"values", "[3, 4]", "[3, 3]"});
  expect([](CutArgs& a) { a.kept = {}; }, {"kept, counts or positions", "none"});
  expect([](CutArgs& a) { a.kept.stride[0] = 0; }, {"kept", "overlap"});
  expect([](CutArgs& a) { a.shard = {2, 0, 1}; }, {"shard.world", "1 ranks", "2"});
  expect([](CutArgs& a) { a.shard.interleave = 0; }, {"shard.interleave", "0"});
  expect([](CutArgs& a) { a.form = static_cast<CutForm>(9); }, {"form", "9"});
  std::byte small[1];
  expect([&](CutArgs& a) { a.workspace = small; }, {"workspace"});
  if (testing::device_present()) return;
  expect([](CutArgs& a) { a.target.device = cuda(); }, {"cut", "no kernel fits"},
         ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace winnow
