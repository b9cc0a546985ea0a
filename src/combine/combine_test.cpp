// combine: bit for bit what merge() gives for the parts side by side, over every number of ranks;
// both wires, empty parts, the sink once; bytes as the header says; ranks that differ; refusals.
#include "winnow/combine.h"

#include <cstring>
#include <limits>

#include "core/formats.h"
#include "device_ranks.h"
#include "testing.h"
#include "winnow/merge.h"

namespace winnow {
namespace {

using testing::Guarded;
using tools::ThreadRanks;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr int64_t kHeads = 24;

// Partial results of every rank, some of them empty.
struct Parts {
  int64_t tokens, d_v;
  int32_t ranks;
  testing::MappedVector<float> out, lse, sink;

  Parts(int64_t tokens_, int64_t d_v_, int32_t ranks_)
      : tokens(tokens_),
        d_v(d_v_),
        ranks(ranks_),
        out(ranks * tokens * kHeads * d_v),
        lse(ranks * tokens * kHeads),
        sink(kHeads) {
    testing::Rng rng(ranks * 100 + d_v);
    for (float& x : out) x = testing::normal(rng);
    for (float& x : sink) x = testing::normal(rng);
    for (float& x : lse) {
      x = 3 * testing::normal(rng);
      if (testing::draw(rng, 0, 3) == 0) x = testing::draw(rng, 0, 1) ? kInf : -kInf;
    }
  }
  int64_t own() const { return kHeads / ranks; }
  Tensor out_of(int32_t rank) const {
    return tensor(out.data() + rank * tokens * kHeads * d_v, {tokens, kHeads, d_v});
  }
  Tensor lse_of(int32_t rank) const {
    return tensor(lse.data() + rank * tokens * kHeads, {tokens, kHeads});
  }
  Tensor sink_of(int32_t rank) const { return tensor(sink.data() + rank * own(), {own()}); }

  // The heads of a rank, from all parts where they are.
  void merged(int32_t rank, bool bf16_wire, MergeArgs results) const {
    testing::MappedVector<bf16> rounded(out.size());
    for (size_t i = 0; i < out.size(); ++i) rounded[i] = to_bf16(out[i]);
    const int64_t first = rank * own();
    const std::initializer_list<int64_t> shape = {ranks, tokens, own(), d_v};
    const std::initializer_list<int64_t> stride = {tokens * kHeads * d_v, kHeads * d_v, d_v, 1};
    results.partial_out = bf16_wire ? tensor(rounded.data() + first * d_v, shape, stride)
                                    : tensor(out.data() + first * d_v, shape, stride);
    results.partial_lse =
        tensor(lse.data() + first, {ranks, tokens, own()}, {tokens * kHeads, kHeads, 1});
    results.sink = sink_of(rank);
    merge(results);
    EXPECT_TRUE(testing::stream_finished(results.target.device));
  }

  // A rank's parts in blocks of heads with their lse after them, `gap` floats between blocks.
  testing::MappedVector<float> blocks(int32_t rank, int64_t gap) const {
    const int64_t rows = tokens * own(), block = rows * (d_v + 1) + gap;
    testing::MappedVector<float> all(ranks * block);
    for (int64_t t = 0; t < tokens; ++t)
      for (int64_t h = 0; h < kHeads; ++h) {
        float* const to = all.data() + h / own() * block;
        const int64_t row = t * own() + h % own();
        const int64_t from = (rank * tokens + t) * kHeads + h;
        std::copy_n(out.data() + from * d_v, d_v, to + row * d_v);
        to[rows * d_v + row] = lse[from];
      }
    return all;
  }
};

// On a kind of device, over a number of ranks.
class CombineTest : public ::testing::TestWithParam<std::tuple<DeviceKind, int32_t>> {
 protected:
  void SetUp() override {
    if (std::get<0>(GetParam()) == DeviceKind::kCpu) return;
    if (const std::string why = testing::why_not("merge", "sm90"); !why.empty())
      GTEST_SKIP() << why;
  }
};

// `layout`: parts as attend() gives them; in blocks as they travel; in blocks with other gaps.
TEST_P(CombineTest, HasTheBitsOfMerge) {
  const auto [kind, ranks] = GetParam();
  for (const int64_t tokens : {0, 1, 5})
    for (const int64_t d_v : {512, 7})
      for (const Wire wire : {Wire::kF32, Wire::kBf16})
        for (const int layout : {0, 1, 2}) {
          const Parts parts(tokens, d_v, ranks);
          const int64_t own = parts.own(), block_rows = tokens * own;
          testing::DeviceRanks group(ranks);
          const auto errors = group.run([&](Communicator& comm) {
            const int32_t r = comm.rank();
            const testing::OwnDevice device(kind);
            const size_t rows = static_cast<size_t>(block_rows);
            Guarded<bf16> out(rows * d_v), want(rows * d_v);
            Guarded<float> lse(rows), want_lse(rows);
            CombineArgs a{.comm = &comm,
                          .wire = wire,
                          .partial_out = parts.out_of(r),
                          .partial_lse = parts.lse_of(r),
                          .sink = parts.sink_of(r),
                          .out = tensor(out.data(), {tokens, own, d_v}),
                          .lse = tensor(lse.data(), {tokens, own}),
                          .target = {.device = device.get()}};
            const int64_t floats = block_rows * (d_v + 1);
            const int64_t gap = layout == 2 ? 2 : (4 - floats % 4) % 4;
            const auto blocks = parts.blocks(r, gap);
            if (layout > 0) {
              a.partial_out = tensor(blocks.data(), {ranks, tokens, own, d_v},
                                     {floats + gap, own * d_v, d_v, 1});
              a.partial_lse = tensor(blocks.data() + block_rows * d_v, {ranks, tokens, own},
                                     {floats + gap, own, 1});
            }
            const testing::DeviceWorkspace workspace(device.get(), combine_workspace_bytes(a));
            a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
            combine(a);
            EXPECT_TRUE(testing::stream_finished(device.get()));
            parts.merged(r, wire == Wire::kBf16 && ranks > 1,
                         {.partial_out = {},
                          .partial_lse = {},
                          .out = tensor(want.data(), {tokens, own, d_v}),
                          .lse = tensor(want_lse.data(), {tokens, own}),
                          .target = {.device = device.get()}});
            EXPECT_EQ(std::memcmp(out.data(), want.data(), rows * d_v * sizeof(bf16)), 0);
            EXPECT_EQ(std::memcmp(lse.data(), want_lse.data(), rows * sizeof(float)), 0);
          });
          EXPECT_EQ(errors, std::vector<std::string>(ranks));
          ThreadRanks::Counted counted;
          if (ranks > 1) counted.exchanges = 1;
          if (ranks > 1 && tokens > 0) {
            const int64_t values = tokens * own * d_v * (wire == Wire::kF32 ? 4 : 2);
            const int64_t block = (values + 3) / 4 * 4 + tokens * own * 4;
            counted.all_to_alls = 1;
            counted.all_to_all_bytes = (ranks - 1) * ((block + 15) / 16 * 16);
          }
          for (int32_t r = 0; r < ranks; ++r) EXPECT_EQ(group.counted(r), counted);
        }
}

INSTANTIATE_TEST_SUITE_P(Ranks, CombineTest,
                         ::testing::Combine(::testing::Values(DeviceKind::kCpu, DeviceKind::kCuda),
                                            ::testing::Values(1, 2, 3, 4, 8)),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param) == DeviceKind::kCpu
                                                  ? "cpu_"
                                                  : "cuda_") +
                                  std::to_string(std::get<1>(info.param));
                         });

TEST(Combine, RanksThatDifferAreNamed) {
  const Parts parts(3, 8, 3);
  for (const int fault : {0, 1, 2}) {
    ThreadRanks group(3);
    const auto errors = group.run([&](Communicator& comm) {
      std::vector<float> out(3 * 8 * 8);
      CombineArgs a{.comm = &comm,
                    .partial_out = parts.out_of(comm.rank()),
                    .partial_lse = parts.lse_of(comm.rank()),
                    .out = tensor(out.data(), {3, 8, 8})};
      if (comm.rank() == 1 && fault == 0)
        a.partial_out.shape[0] = a.partial_lse.shape[0] = a.out.shape[0] = 2;
      if (comm.rank() == 1 && fault == 1) a.wire = Wire::kBf16;
      if (comm.rank() == 1 && fault == 2) a.out.shape[1] = 7;
      combine(a);
    });
    for (const std::string& e : errors) {
      EXPECT_EQ(e.find("combine: "), 0u) << e;
      if (fault < 2) {
        EXPECT_NE(e.find("on rank 1"), std::string::npos) << e;
      }
    }
    EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
    EXPECT_EQ(errors[0], errors[2]);
  }
}

TEST(CombineErrors, NameTheArgument) {
  const Parts parts(3, 8, 1);
  std::vector<float> out(3 * kHeads * 8);
  const CombineArgs good{.partial_out = parts.out_of(0),
                         .partial_lse = parts.lse_of(0),
                         .out = tensor(out.data(), {3, kHeads, 8})};
  const auto expect = [&](auto change, std::initializer_list<const char*> words,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    CombineArgs a = good;
    change(a);
    testing::expect_error([&] { combine(a); }, code, words);
  };
  expect([](CombineArgs& a) { a.partial_out = {}; }, {"combine", "partial_out", "nothing"});
  expect([](CombineArgs& a) { a.partial_out.dtype = DType::kBf16; }, {"partial_out", "bf16"});
  expect([](CombineArgs& a) { a.partial_lse.shape[1] = 3; }, {"partial_lse", "[3, 24]"});
  expect([](CombineArgs& a) { a.out.shape[2] = 9; }, {"out", "[3, 24, 8]"});
  expect([](CombineArgs& a) { a.wire = static_cast<Wire>(5); }, {"wire", "5"});
  std::byte small[1];
  expect([&](CombineArgs& a) { a.workspace = small; }, {"workspace"});
  if (testing::device_present()) return;
  expect([](CombineArgs& a) { a.target.device = cuda(); }, {"no kernel fits"},
         ErrorCode::kUnsupported);
}

}  // namespace
}  // namespace winnow
