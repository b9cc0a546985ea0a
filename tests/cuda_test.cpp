// What CUDA asks of every verb: capture in a graph and replay with other contents, the same bits
// again on any stream and over any workspace; calls of two host threads; caches above 4 GiB with
// NaN wherever nothing was written. Skipped, with the reason, where there is no Hopper device.
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(Cuda, IsNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include <chrono>
#include <thread>

#include "cuda/device.h"
#include "cuda_verbs.h"
#include "machine.h"
#include "model/index.h"
#include "pipeline_problem.h"

namespace winnow {
namespace {

using testing::Verb;
using testing::VerbPtr;

// For GTEST_SKIP; where a device was promised the test fails.
std::string why_no_device() {
  return testing::allowed_skip(internal::cuda::missing(), testing::expects_device());
}

struct Stream {
  cudaStream_t stream = nullptr;
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(stream); }
  Device device() const { return cuda(stream); }
};

// What `run` queues on the stream, as a graph that can be replayed.
class Graph {
 public:
  Graph(const Stream& s, const std::function<void(const Device&)>& run) : stream_(s.stream) {
    EXPECT_EQ(cudaStreamBeginCapture(s.stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    run(s.device());
    EXPECT_EQ(cudaStreamEndCapture(s.stream, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&replay_, graph_, 0), cudaSuccess);
  }
  ~Graph() {
    cudaGraphExecDestroy(replay_);
    cudaGraphDestroy(graph_);
  }
  void replay() const { EXPECT_EQ(cudaGraphLaunch(replay_, stream_), cudaSuccess); }
  size_t launches() const {
    size_t nodes = 0;
    EXPECT_EQ(cudaGraphGetNodes(graph_, nullptr, &nodes), cudaSuccess);
    return nodes;
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t replay_ = nullptr;
};

class CudaVerb : public ::testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
    verb = testing::verbs()[GetParam()].second();
  }
  std::string direct(int version, const Device& device, int scratch = 0xff) {
    verb->load(version, scratch);
    verb->run(device);
    return verb->results();
  }
  VerbPtr verb;
};

TEST_P(CudaVerb, ReplaysWithOtherContents) {
  const Stream stream;
  const std::string want[2] = {direct(0, stream.device()), direct(1, stream.device())};
  EXPECT_NE(want[0], want[1]) << "contents do not matter to this test";
  verb->load(0);
  const Graph graph(stream, verb->run);
  for (const int version : {1, 0, 1}) {
    verb->load(version);
    graph.replay();
    EXPECT_TRUE(verb->results() == want[version]) << "version " << version;
  }
}

// norm_write, prepare_queries and two compressors: four launches of a C4A layer before score().
TEST_P(CudaVerb, OfALayerIsOneLaunch) {
  const std::string_view name = testing::verbs()[GetParam()].first;
  if (name.find("compress") == name.npos && name != "norm_write" && name != "prepare_queries")
    return;
  const Stream stream;
  verb->load(0);
  EXPECT_EQ(Graph(stream, verb->run).launches(), 1u);
}

TEST_P(CudaVerb, MayBeCapturedFirst) {
  const Stream stream;
  verb->load(0);
  const Graph graph(stream, verb->run);
  graph.replay();
  const std::string got = verb->results();
  EXPECT_TRUE(got == direct(0, stream.device()));
}

TEST_P(CudaVerb, GivesTheSameBitsAgain) {
  const Stream one, two;
  const std::string want = direct(0, one.device());
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(direct(0, one.device()) == want);
  EXPECT_TRUE(direct(0, two.device()) == want) << "another stream";
  EXPECT_TRUE(direct(0, cuda()) == want) << "the default stream";
  EXPECT_TRUE(direct(0, one.device(), 0x00) == want) << "another workspace";
}

// Calls of two streams may run at the same time, or one may wait for the other.
TEST_P(CudaVerb, RunsBesideItself) {
  const VerbPtr other = testing::verbs()[GetParam()].second();
  const Stream one, two;
  const std::string want[2] = {direct(0, one.device()), direct(1, one.device())};
  verb->load(0), other->load(1);
  for (int i = 0; i < 20; ++i) verb->run(one.device()), other->run(two.device());
  EXPECT_TRUE(verb->results() == want[0]);
  EXPECT_TRUE(other->results() == want[1]);
}

TEST_P(CudaVerb, NamesADeviceThatIsNotThere) {
  testing::expect_invalid([&] { direct(0, cuda(nullptr, 63)); }, {"target.device", "63"});
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

// Two host threads whose calls of one kernel take shared memory of different sizes, whose limit is
// the kernel's and not the call's.
void run_side_by_side(const VerbPtr (&verbs)[2]) {
  const Stream streams[2];
  std::string want[2];
  for (const int i : {0, 1}) {
    verbs[i]->load(0);
    verbs[i]->run(streams[i].device());
    want[i] = verbs[i]->results();
    verbs[i]->load(0);
  }
  const auto call = [&](int i) {
    for (int round = 0; round < 2000; ++round)
      EXPECT_NO_THROW(verbs[i]->run(streams[i].device())) << "call " << round << " of thread " << i;
  };
  std::thread other(call, 1);
  call(0);
  other.join();
  for (const int i : {0, 1}) EXPECT_TRUE(verbs[i]->results() == want[i]) << "thread " << i;
}

TEST(CudaThreads, SelectOfTwoLengths) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  run_side_by_side({testing::select_verb(9000, 64, 68), testing::select_verb(30000, 64, 68)});
}

TEST(CudaThreads, MhaOfTwoKeyWidths) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  run_side_by_side({testing::mha_verb(1, 30, false, 64), testing::mha_verb(1, 30, false, 512)});
}

INSTANTIATE_TEST_SUITE_P(Verbs, CudaVerb, ::testing::Range<size_t>(0, testing::verbs().size()),
                         [](const auto& info) { return testing::verbs()[info.param].first; });

// A captured step replayed after a refill: lengths, positions and request ids come from the plan's
// block when the graph runs.
class CudaPipeline : public ::testing::TestWithParam<testing::Layout> {};

TEST_P(CudaPipeline, ReplaysAfterARefill) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  const Stream stream;
  testing::World world(GetParam(), {{1, 2, 70}, {2, 1, 37}, {3, 2, 31}}, 3);
  PlanOptions options = world.options("sm90");
  options.target.device = stream.device();
  Plan plan(options);
  const std::vector<int32_t> lens[2] = {{70, 37, 31}, {55, 36, 12}};
  const auto refill = [&](int i) { plan.refill({world.starts, lens[i], world.tokens}); };
  const testing::DeviceWorkspace memory(cuda(), pipeline_workspace_bytes(plan));
  const std::span workspace{static_cast<std::byte*>(memory.data()), memory.size()};
  const auto results = [&] {
    EXPECT_TRUE(testing::device_finished());
    std::vector<uint32_t> all;
    for (const bf16 x : world.out) all.push_back(x.bits);
    for (const float x : world.lse) all.push_back(std::bit_cast<uint32_t>(x));
    return all;
  };
  std::vector<uint32_t> want[2];
  for (const int i : {0, 1}) {
    refill(i);
    pipeline(world.args(plan, workspace));
    want[i] = results();
  }
  EXPECT_NE(want[0], want[1]);
  refill(0);
  const PipelineArgs args = world.args(plan, workspace);
  const Graph graph(stream, [&](const Device&) { pipeline(args); });
  for (const int i : {1, 0, 1}) {
    refill(i);
    graph.replay();
    EXPECT_TRUE(results() == want[i]) << "batch " << i;
  }
}

// A refill that comes while the copy of the batch before it is still queued.
TEST(CudaPlan, RefillWaitsForTheCopy) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  const Stream stream, other;
  testing::World world(testing::layout_named("v32_mixed"), {{1, 2, 70}, {2, 1, 37}, {3, 2, 31}}, 3);
  PlanOptions options = world.options("sm90");
  options.target.device = cuda();
  Plan plan(options);
  const size_t bytes = pipeline_workspace_bytes(plan);
  const testing::DeviceWorkspace one(cuda(), bytes), two(cuda(), bytes);
  const auto run = [&](const Stream& s, const testing::DeviceWorkspace& memory) {
    PipelineArgs args = world.args(plan, {static_cast<std::byte*>(memory.data()), bytes});
    args.target.device = s.device();
    pipeline(args);
  };
  const auto results = [&] {
    EXPECT_TRUE(testing::device_finished());
    std::vector<uint16_t> all;
    for (const bf16 x : world.out) all.push_back(x.bits);
    return all;
  };
  plan.refill(world.batch());
  run(stream, one);
  const std::vector<uint16_t> want = results();
  const auto late = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(50)); };
  EXPECT_EQ(cudaLaunchHostFunc(stream.stream, late, nullptr), cudaSuccess);
  run(stream, one);
  run(other, two);  // waits for the copy on the first stream, and so does the refill
  const std::vector<int32_t> shorter{50, 20, 10};
  plan.refill({world.starts, shorter, world.tokens});
  EXPECT_TRUE(results() == want);
}

std::vector<testing::Layout> one_part_layouts() {  // the parts of a batch are baked into a graph
  std::vector<testing::Layout> some;
  for (const testing::Layout& l : testing::layouts())
    if (!l.separate()) some.push_back(l);
  return some;
}
INSTANTIATE_TEST_SUITE_P(Layouts, CudaPipeline, ::testing::ValuesIn(one_part_layouts()),
                         [](const auto& info) { return info.param.name; });

// A captured decode step of a compressor, replayed token by token over two boundaries: no decision
// of the host is left in it. Two requests whose boundaries lie apart; the same calls without a
// graph give the same bytes.
class CudaCompressor : public ::testing::TestWithParam<int32_t> {};

TEST_P(CudaCompressor, ReplaysAcrossBoundaries) {
  if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
  using testing::Guarded;
  const int32_t ratio = GetParam();
  const bool overlap = ratio == 4;
  const int64_t values = overlap ? 1024 : 512, ring = (overlap ? 2 : 1) * ratio, pages = 4;
  const Stream stream;
  Guarded<int32_t> positions(2), requests(std::vector<int32_t>{0, 1});
  Guarded<int32_t> pages_of(std::vector<int32_t>{2, 0, 1, 3});
  Guarded<float> rows(2 * 2 * values), angles(1024 * 64);
  rope_table({.table = tensor(angles.data(), {1024, 2, 32})});
  struct Side {
    Guarded<float> state;
    Guarded<uint8_t> bytes;
    Guarded<int64_t> slots;
  };
  std::vector<Side> sides;
  for (int i = 0; i < 2; ++i)
    sides.push_back({Guarded<float>(2 * ring * 2 * values, 0),
                     Guarded<uint8_t>(pages * page_bytes(CacheFormat::kV4Fp8, 16), 0),
                     Guarded<int64_t>(2)});
  const auto call = [&](Side& side, const Device& device) {
    compressed_slots({.positions = tensor(positions.data(), {2}),
                      .requests = tensor(requests.data(), {2}),
                      .block_table = tensor(pages_of.data(), {2, 2}),
                      .ratio = ratio,
                      .page = 16,
                      .pages = pages,
                      .slots = tensor(side.slots.data(), {2}),
                      .target = {.device = device}});
    compress({.rows = tensor(rows.data(), {2, 2 * values}),
              .positions = tensor(positions.data(), {2}),
              .requests = tensor(requests.data(), {2}),
              .ratio = ratio,
              .overlap = overlap,
              .state = {.rows = tensor(side.state.data(), {2, ring, 2 * values}), .ring = true},
              .rope = {.table = tensor(angles.data(), {1024, 2, 32})},
              .slots = tensor(side.slots.data(), {2}),
              .cache = {side.bytes.data(), CacheFormat::kV4Fp8, pages, 16},
              .target = {.device = device}});
  };
  positions[0] = positions[1] = 0;
  const Graph graph(stream, [&](const Device& device) { call(sides[0], device); });
  testing::Rng rng{7};
  int64_t stored = 0;
  for (int32_t p = 0; p < 2 * ratio + ratio / 2 + 1; ++p) {
    positions[0] = p;
    positions[1] = p < ratio / 2 ? -1 : p - ratio / 2;
    for (float& x : rows) x = testing::normal(rng);
    graph.replay();
    call(sides[1], stream.device());
    ASSERT_TRUE(testing::device_finished());
    ASSERT_TRUE(sides[0].state.values() == sides[1].state.values()) << "token " << p;
    ASSERT_TRUE(sides[0].bytes.values() == sides[1].bytes.values()) << "token " << p;
    for (const int64_t slot : sides[0].slots) stored += slot >= 0;
  }
  EXPECT_GE(stored, 4);
  EXPECT_NE(std::count(sides[0].bytes.begin(), sides[0].bytes.end(), 0),
            std::ssize(sides[0].bytes.values()));
}
INSTANTIATE_TEST_SUITE_P(Ratios, CudaCompressor, ::testing::Values(2, 4, 128));

// A cache of more than 4 GiB, all NaN; records near its end are written, read and attended to as in
// a small one.
class LargeCache : public ::testing::TestWithParam<CacheFormat> {
 protected:
  static constexpr int64_t kBytes = int64_t{4608} << 20;
  void SetUp() override {
    if (const std::string why = why_no_device(); !why.empty()) GTEST_SKIP() << why;
    const int64_t page_size = page_bytes(GetParam(), kPage);
    large = {nullptr, GetParam(), kBytes / page_size + 1, kPage};
    small = {nullptr, GetParam(), kPages, kPage};
    for (Cache* c : {&large, &small}) {
      ASSERT_EQ(cudaMalloc(&c->data, c->pages * page_size), cudaSuccess);
      cudaMemset(c->data, 0xff, c->pages * page_size);
    }
  }
  void TearDown() override {
    for (const Cache& c : {large, small}) cudaFree(c.data);
  }
  // The last pages of either cache.
  static int32_t page_of(const Cache& c, int64_t i) {
    return static_cast<int32_t>(c.pages - 1 - i);
  }

  static constexpr int32_t kPage = 64;
  static constexpr int64_t kPages = 4, kTokens = kPages * kPage;
  Cache large, small;
};

TEST_P(LargeCache, OffsetsHave64Bits) {
  testing::Rng rng(3);
  const int64_t d = record_dim(GetParam());
  testing::MappedVector<bf16> kv(kTokens * d);
  for (bf16& x : kv) x = to_bf16(testing::normal(rng));
  std::vector<std::vector<uint32_t> > results;
  for (const Cache& cache : {large, small}) {
    testing::MappedVector<int64_t> slots;
    testing::MappedVector<int32_t> table;
    for (int64_t i = 0; i < kPages; ++i) table.push_back(page_of(cache, i));
    for (int64_t t = 0; t < kTokens; ++t)
      slots.push_back(int64_t{table[t / kPage]} * kPage + t % kPage);
    write({.kv = tensor(kv.data(), {kTokens, d}),
           .slots = tensor(slots.data(), {kTokens}),
           .cache = cache,
           .target = {.device = cuda()}});
    std::vector<uint32_t>& all = results.emplace_back();
    if (is_index(GetParam())) {
      testing::MappedVector<float> weights(16, 0.5f), logits(kTokens);
      testing::MappedVector<e4m3> q(16 * 128, to_e4m3(0.25f));
      testing::MappedVector<bf16> wide_q(16 * 128, to_bf16(0.25f));
      const bool wide = GetParam() == CacheFormat::kIndexKeysBf16;
      testing::MappedVector<int32_t> ends(1, kTokens), request(1, 0);
      score({.q = wide ? tensor(wide_q.data(), {1, 16, 128}) : tensor(q.data(), {1, 16, 128}),
             .weights = tensor(weights.data(), {1, 16}),
             .keys = cache,
             .block_table = tensor(table.data(), {1, kPages}),
             .requests = tensor(request.data(), {1}),
             .ends = tensor(ends.data(), {1}),
             .logits = tensor(logits.data(), {1, kTokens}),
             .target = {.device = cuda()}});
      ASSERT_TRUE(testing::device_finished());
      for (const float x : logits) {
        ASSERT_TRUE(std::isfinite(x));  // no NaN of unused memory
        all.push_back(std::bit_cast<uint32_t>(x));
      }
    } else {
      testing::MappedVector<int32_t> length(1, kTokens), ids(slots.begin(), slots.end());
      testing::MappedVector<bf16> rows(kTokens * d), out(16 * 512);
      gather({.cache = cache,
              .block_table = tensor(table.data(), {1, kPages}),
              .lengths = tensor(length.data(), {1}),
              .out = tensor(rows.data(), {kTokens, d}),
              .target = {.device = cuda()}});
      attend({.q = tensor(kv.data(), {1, 16, d}),
              .lists = {KvList{.cache = cache, .indices = tensor(ids.data(), {1, kTokens})}},
              .scale = 0.05f,
              .out = tensor(out.data(), {1, 16, 512}),
              .target = {.device = cuda()}});
      ASSERT_TRUE(testing::device_finished());
      rows.insert(rows.end(), out.begin(), out.end());
      for (const bf16 x : rows) {
        ASSERT_TRUE(std::isfinite(to_float(x)));
        all.push_back(x.bits);
      }
    }
  }
  EXPECT_TRUE(results[0] == results[1]);
}

INSTANTIATE_TEST_SUITE_P(Formats, LargeCache, ::testing::ValuesIn(cache_formats()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace winnow

#endif
