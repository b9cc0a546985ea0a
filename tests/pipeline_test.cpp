// pipeline: every kernel x model x mode against fp64 from the written cache; the same bits again,
// in another batch and without a single allocation; refusals before anything is written.
#include "winnow/pipeline.h"

#include <atomic>
#include <cstdlib>
#include <new>
#include <set>

#include "accuracy.h"
#include "layer_steps_problem.h"
#include "pipeline_problem.h"
#include "winnow/error.h"

namespace {
std::atomic<int64_t> allocations{0};
}

[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes ? bytes : 1);
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* p = operator new(bytes, std::nothrow)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace winnow {
namespace {

using testing::expect_invalid;
using testing::Guarded;
using testing::Layout;
using testing::Request;
using testing::World;

constexpr const char* kStageNames[] = {"write",  "score",  "select", "locate",
                                       "attend", "gather", "lists"};

// Every kernel name of any stage; "" leaves the choice to the plan.
std::vector<std::string> kernel_names() {
  std::set<std::string> names = {""};
  for (const char* stage : kStageNames)
    for (const std::string& k : testing::kernels(stage)) names.insert(k);
  return std::vector<std::string>(names.begin(), names.end());
}

// Why some stage that has this kernel cannot run it here.
std::string missing(const std::string& kernel) {
  for (const KernelInfo& k : support())
    if (testing::family(k.kernel) == kernel && !k.available)
      return testing::allowed_skip(k.reason, testing::should_run(kernel));
  return {};
}

const char* name_or_null(const std::string& kernel) {
  return kernel.empty() ? nullptr : kernel.c_str();
}

// A batch through a plan made for it.
struct Done {
  World world;
  Plan plan;
  Guarded<std::byte> workspace;

  Done(const Layout& s, const std::vector<Request>& batch, int64_t padding,
       const std::string& kernel)
      : world(s, batch, padding),
        plan(world.options(name_or_null(kernel))),
        workspace(pipeline_workspace_bytes(plan) + kOff) {
    plan.refill(world.batch());
    run();
  }
  void run() {
    pipeline(args());
    EXPECT_TRUE(testing::device_finished());
  }
  PipelineArgs args() { return world.args(plan, memory()); }
  // Of no particular alignment, and not a byte more than requested.
  std::span<std::byte> memory() { return {workspace.data() + kOff, workspace.size() - kOff}; }
  static constexpr size_t kOff = 7;
};

constexpr tools::Bar kOutBar = tools::kDecodeOut;

void expect_right(Done& done) {
  std::vector<float> want, want_lse;
  done.world.expected(done.plan, want, want_lse);
  const PipelineArgs a = done.args();
  Tensor like = a.out;
  like.data = want.data();
  like.dtype = DType::kF32;
  const tools::Deviation out = tools::compare(a.out, like, kOutBar);
  EXPECT_TRUE(out.ok) << "out: " << out.text(like);
  like = a.lse;
  like.data = want_lse.data();
  Tensor rounding;
  for (float& x : done.world.rounding) x /= tools::kCancellation;
  if (done.plan.options().target.device.kind == DeviceKind::kCuda) {
    rounding = like;
    rounding.data = done.world.rounding.data();
  }
  const tools::Deviation lse = tools::compare(a.lse, like, tools::kDecodeLse, rounding);
  EXPECT_TRUE(lse.ok) << "lse: " << lse.text(like);
}

bool same(const void* a, const void* b, size_t bytes) { return std::memcmp(a, b, bytes) == 0; }

class Pipeline : public ::testing::TestWithParam<std::tuple<std::string, Layout>> {
 protected:
  void SetUp() override {
    if (const std::string why = missing(kernel()); !why.empty()) GTEST_SKIP() << why;
  }
  const std::string& kernel() const { return std::get<0>(GetParam()); }
  const Layout& layout() const { return std::get<1>(GetParam()); }
};

TEST_P(Pipeline, MatchesTheBook) {
  Done done(layout(), testing::mixed_batch(), testing::kPadding, kernel());
  EXPECT_EQ(done.plan.parts().size(), layout().routed && layout().v4() ? 2u
                                      : layout().separate()            ? 3u
                                                                       : 1u);
  expect_right(done);
  // Again, over the same plan and workspace: the same bits.
  World& w = done.world;
  const std::vector<bf16> first = w.out.values();
  const std::vector<float> first_lse = w.lse.values();
  std::memset(done.workspace.data(), 0xff, done.workspace.size());
  done.run();
  EXPECT_TRUE(same(first.data(), w.out.data(), first.size() * sizeof(bf16)));
  EXPECT_TRUE(same(first_lse.data(), w.lse.data(), first_lse.size() * sizeof(float)));
}

class FixedSplit : public Pipeline {};

TEST_P(FixedSplit, IsBatchInvariant) {
  const std::vector<Request> all = testing::mixed_batch();
  Done together(layout(), all, testing::kPadding, kernel());
  expect_right(together);
  for (size_t i : {size_t{0}, size_t{3}}) {  // a decode and a prefill, each alone
    Done alone(layout(), {all[i]}, 0, kernel());
    const World &a = alone.world, &t = together.world;
    const int64_t row = World::kHeads * layout().model.d_v, n = all[i].query;
    EXPECT_TRUE(same(a.out.data(), t.out.data() + t.starts[i] * row, n * row * sizeof(bf16)))
        << "request " << i;
    EXPECT_TRUE(same(a.lse.data(), t.lse.data() + t.starts[i] * World::kHeads,
                     n * World::kHeads * sizeof(float)))
        << "request " << i;
  }
}

std::string test_name(const ::testing::TestParamInfo<std::tuple<std::string, Layout>>& info) {
  const auto& [kernel, layout] = info.param;
  return (kernel.empty() ? "chosen" : kernel) + "_" + layout.name;
}
INSTANTIATE_TEST_SUITE_P(Kernels, Pipeline,
                         ::testing::Combine(::testing::ValuesIn(kernel_names()),
                                            ::testing::ValuesIn(testing::layouts())),
                         test_name);
INSTANTIATE_TEST_SUITE_P(Kernels, FixedSplit,
                         ::testing::Combine(::testing::ValuesIn(kernel_names()),
                                            ::testing::ValuesIn(testing::fixed_layouts())),
                         test_name);

TEST(PipelineBatches, LongListsAreCutBetweenWorkers) {
  for (Layout s : {testing::layout_named("v32_mixed"), testing::layout_named("v4_mixed")}) {
    (s.v4() ? s.extra : s.topk) = s.v4() ? 70 : 250;
    Done done(s, {{7, 1, 300}, {8, 2, 290}}, 0, "");
    expect_right(done);
  }
}

TEST(PipelineBatches, NothingToDo) {
  for (const Layout& s : testing::layouts()) {
    Done empty(s, {}, 0, "");
    Done padded(s, {{1, 2, 0}}, 3, "");
    expect_right(padded);
  }
}

TEST(PipelineBatches, PlanIsReusedForTheNextStep) {
  // A decode step and the next one, on one plan: the second sees what the first wrote.
  for (const Layout& s : testing::layouts()) {
    Done done(s, {{1, 1, 40}, {4, 9, 30}}, 2, "");
    expect_right(done);
    World next(s, {{9, 2, 61}, {2, 1, 10}}, 0);
    done.plan.refill(next.batch());
    pipeline(next.args(done.plan, done.memory()));
    std::vector<float> want, want_lse;
    next.expected(done.plan, want, want_lse);
    Tensor like = tensor(want.data(), {next.tokens, World::kHeads, s.model.d_v});
    Tensor got = tensor(next.out.data(), {next.tokens, World::kHeads, s.model.d_v});
    const tools::Deviation out = tools::compare(got, like, kOutBar);
    EXPECT_TRUE(out.ok) << s.name << ": " << out.text(like);
  }
}

TEST(PipelineCost, AllocatesNothing) {
  for (const Layout& s : testing::layouts())
    for (const char* kernel : {"", "reference"}) {
      Done done(s, testing::mixed_batch(), testing::kPadding, kernel);  // starts the workers, too
      const PipelineArgs args = done.args();
      const Batch batch = done.world.batch();
      const int64_t before = allocations;
      done.plan.refill(batch);
      EXPECT_EQ(allocations - before, 0) << "refill, " << s.name;
      pipeline(args);
      EXPECT_EQ(allocations - before, 0) << s.name << " " << kernel;
    }
}

// From a V4 layer's projections on, too, and where kernels are passed over.
TEST(PipelineCost, StepsAllocateNothing) {
  for (const char* kernel : {static_cast<const char*>(nullptr), "reference"}) {
    const testing::steps::Kind kind{
        .name = "", .extra = 8, .overlap = true, .indexed = true, .kernel = kernel};
    testing::steps::Layer layer(kind);
    testing::steps::Side side(kind);
    layer.draw({{9, 5}, {9, 5}});
    Guarded<bf16> out(layer.tokens * testing::steps::kHeads * testing::steps::kDim);
    const PipelineArgs args = layer.fused(side, out.data());
    pipeline(args);  // starts the workers
    const int64_t before = allocations;
    pipeline(args);
    EXPECT_EQ(allocations - before, 0) << (kernel ? kernel : "");
  }
}

TEST(PipelineCost, LogitsAreNotKept) {
  // 4,096 tokens of a context of 131,072 would take 2 GiB of logits; ids alone take 32 MiB.
  const Plan plan({.page = 64, .pages = 4096, .max_tokens = 4096, .max_context = 131072});
  EXPECT_LT(pipeline_workspace_bytes(plan), size_t{256} << 20);
}

// A layer without an indexer takes the choice of one before it (GLM-5): the same output from the
// same caches, whatever reads them.
TEST_P(Pipeline, TakesTheChoiceOfAnotherLayer) {
  const int32_t width = layout().v4() ? layout().extra : layout().topk;
  if (width == 0 || !layout().indexed) return;  // nothing is chosen
  Done done(layout(), testing::mixed_batch(), testing::kPadding, kernel());
  const std::vector<bf16> want = done.world.out.values();
  Guarded<int32_t> ids(done.plan.tokens() * width);
  PipelineArgs a = done.args();
  a.ids = tensor(ids.data(), {done.plan.tokens(), width});
  pipeline(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_TRUE(same(want.data(), done.world.out.data(), want.size() * sizeof(bf16)));
  const std::vector<int32_t> chosen = ids.values();
  done.world.out.poison();
  a.indexer = {};
  pipeline(a);
  ASSERT_TRUE(testing::device_finished());
  EXPECT_TRUE(same(want.data(), done.world.out.data(), want.size() * sizeof(bf16)));
  EXPECT_EQ(chosen, ids.values()) << "an input";
}

TEST(PipelineErrors, NameTheArgumentAndWriteNothing) {
  for (const char* name : {"v32_mixed", "v4_mixed"}) {
    const Layout s = testing::layout_named(name);
    World w(s, testing::mixed_batch(), testing::kPadding);
    Plan plan(w.options(nullptr));
    plan.refill(w.batch());
    Guarded<std::byte> workspace(pipeline_workspace_bytes(plan));
    const auto before = std::tuple(w.main.bytes.values(), w.states.bytes.values(),
                                   w.keys.bytes.values(), workspace.values());
    const std::vector<float> lse = w.lse.values();
    const auto expect = [&](auto change, std::initializer_list<const char*> words) {
      PipelineArgs a = w.args(plan, {workspace.data(), workspace.size()});
      change(a);
      expect_invalid([&] { pipeline(a); }, words);
      EXPECT_EQ(before, std::tuple(w.main.bytes.values(), w.states.bytes.values(),
                                   w.keys.bytes.values(), workspace.values()))
          << *words.begin();
      EXPECT_TRUE(same(lse.data(), w.lse.data(), lse.size() * sizeof(float)));
    };
    using Args = PipelineArgs&;
    expect([](Args a) { a.plan = nullptr; }, {"pipeline", "plan"});
    expect([](Args a) { a.kv.shape[0] -= 1; }, {"kv", "at least", "rows"});
    expect([](Args a) { a.kv.shape[1] -= 1; }, {"kv"});
    expect([](Args a) { a.kv.dtype = DType::kF32; }, {"kv", "bf16", "f32"});
    expect([](Args a) { a.slots.shape[0] -= 1; }, {"slots", "int64"});
    expect([](Args a) { a.slots = {}; }, {"slots", "nothing"});
    expect([](Args a) { a.cache.format = CacheFormat::kIndexKeys; }, {"cache", "index_keys"});
    expect([](Args a) { a.cache.data = nullptr; }, {"cache", "null"});
    expect([](Args a) { a.cache.pages = 1; }, {"slots", "slots below 16"});
    expect([](Args a) { a.block_table.shape[0] -= 1; }, {"block_table", "at least 6 rows", "5"});
    expect(
        [](Args a) {
          a.workspace = {static_cast<std::byte*>(nullptr), a.workspace.size()};
        },
        {"workspace", "data", "null"});
    expect([](Args a) { a.scale = PipelineArgs{}.scale; }, {"pipeline", "scale", "found none"});
    expect([](Args a) { a.indexer.q.shape[1] += 1; }, {"indexer.q", "[49, 2, 128]"});
    expect([](Args a) { a.indexer.weights = {}; }, {"indexer.weights", "nothing"});
    expect([](Args a) { a.indexer.k = {}; }, {"indexer.k", "nothing"});
    expect([](Args a) { a.indexer.slots = {}; }, {"indexer.slots", "nothing"});
    expect([](Args a) { a.indexer.keys = {}; }, {"indexer.keys"});
    expect([](Args a) { a.indexer.keys.pages = 1; }, {"indexer.slots", "slots below 8"});
    expect([](Args a) { a.indexer.block_table = {}; }, {"indexer.block_table"});
    expect([](Args a) { a.q.shape[1] = 4; }, {"q", "[49, 3, "});
    expect([](Args a) { a.q.stride[2] = 2; }, {"q", "contiguous"});
    expect([](Args a) { a.sink.shape[0] = 2; }, {"sink", "[3]", "[2]"});
    expect([](Args a) { a.out.shape[0] -= 1; }, {"out", "[49, 3, 512]"});
    expect([](Args a) { a.out.stride[1] = 0; }, {"out", "overlap"});
    expect([](Args a) { a.out.data = a.q.data; }, {"pipeline: out: expected memory apart from q"});
    expect([](Args a) { a.kv.data = a.cache.data; },
           {"pipeline: cache: expected memory apart from kv"});
    expect([](Args a) { a.lse.shape[1] = 2; }, {"lse", "[49, 3]"});
    expect([](Args a) { a.workspace = a.workspace.first(a.workspace.size() - 1); },
           {"workspace", "at least"});
    const int32_t other_starts[] = {0, 1}, other_lens[] = {1};
    Plan other(w.options(nullptr));
    other.refill({other_starts, other_lens});
    expect([&](Args a) { a.plan = &other; }, {"slots", "[1]", "[49]"});
    if (!s.v4()) {
      PlanOptions with_mha = w.options(nullptr);
      with_mha.mode = Mode::kAuto;
      with_mha.mha = true;
      Plan decompressing(with_mha);
      decompressing.refill(w.batch());
      expect([&](Args a) { a.plan = &decompressing; }, {"pipeline", "plan", "mha"});
      expect([](Args a) { a.indexer = {}; }, {"indexer.q", "nothing"});
      expect([&](Args a) { a.compressed = w.states.cache(); }, {"compressed", "extra_topk"});
      continue;
    }
    expect([](Args a) { a.compressed = {}; }, {"compressed", "a cache"});
    expect([](Args a) { a.ids = a.block_table; }, {"ids", "[49, "});
    expect([](Args a) { a.compressed.pages = 1; }, {"compressed_slots", "slots below 8"});
    expect([](Args a) { a.compressed_kv = {}; }, {"compressed_kv"});
    expect([](Args a) { a.compressed_slots = {}; }, {"compressed_slots"});
    expect([](Args a) { a.compressed_table.shape[0] = 5; }, {"compressed_table", "at least 6"});
    expect([](Args a) { a.indexer.q = {}; }, {"plan", "extra_topk of at least 17", "6"});
  }
}

}  // namespace
}  // namespace winnow
