// attend: schedules, plans, workspaces, and what a call refuses.
#include <sys/mman.h>

#include <numeric>

#include "attend/attend_problem.h"
#include "attend/kernel.h"
#include "core/schedule.h"
#include "testing.h"
#include "winnow/attend.h"
#include "winnow/plan.h"

namespace winnow {
namespace {

using internal::attend::Answer;
using internal::attend::attend_with_workspace;
using internal::attend::Case;
using internal::attend::expect_close;
using internal::attend::kValueDim;
using internal::attend::Problem;
using internal::attend::Results;
using testing::Guarded;

using AttendOnCpu = internal::attend::KernelTest;

// Pages 3 GB apart: offsets beyond 32 bits.
TEST_P(AttendOnCpu, FarPages) {
  const int64_t stride = int64_t{3} << 30, pages = 3;
  void* memory = mmap(nullptr, pages * stride, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  ASSERT_NE(memory, MAP_FAILED) << "9 GiB of address space";
  Case c{.name = "", .tokens = 1, .heads = 3, .list = {{CacheFormat::kV32Fp8, 2, pages, 40}}};
  Problem p(c);
  Answer want = p.expected();
  for (int64_t i = 0; i < pages; ++i)
    std::memcpy(static_cast<char*>(memory) + i * stride, p.lists[0]->bytes->data() + i * 2 * 656,
                2 * 656);
  Results r(c);
  AttendArgs a = args(p, r);
  a.lists[0].cache.data = memory;
  a.lists[0].cache.page_stride = stride;
  attend_with_workspace(a);
  expect_close(a, want);
  munmap(memory, pages * stride);
}

// A workspace of the size requested, at any address, is enough; without one the call finds its own.
TEST_P(AttendOnCpu, Workspace) {
  Problem p({.name = "", .tokens = 3, .heads = 9, .list = {{CacheFormat::kV4Fp8, 64, 3, 150}}});
  Answer want = p.expected();
  Results r(p.c);
  AttendArgs a = args(p, r);
  const size_t bytes = attend_workspace_bytes(a);
  Guarded<std::byte> memory(bytes + 1);
  for (const size_t offset : {0, 1}) {
    a.workspace = {memory.data() + offset, bytes};
    attend(a);
    expect_close(a, want);
  }
  memory.check();
  a.workspace = {};
  attend(a);
  expect_close(a, want);
}

PlanOptions plan_options(const Case& c, const Target& target, SplitPolicy split) {
  return {.model = internal::attend::model_of_format(c.list[0].format),
          .format = c.list[0].format,
          .heads = static_cast<int32_t>(c.heads),
          .topk = static_cast<int32_t>(c.list[0].width),
          .pages = 3,
          .max_requests = 16,
          .max_tokens = 16,
          .split = split,
          .split_size = 40,
          .target = target};
}

// A batch of the problem's tokens, one per request, in this order.
struct BatchRun {
  Results r;
  BatchRun(Problem& p, Plan& plan, const std::vector<int32_t>& order, Case c)
      : r([&] {
          c.tokens = static_cast<int64_t>(order.size());
          return c;
        }()) {
    const auto n = static_cast<int64_t>(order.size());
    const int64_t width = c.list[0].width, d = p.model.d_qk;
    std::vector<int32_t> starts(n + 1), lens(n, 100), indices;
    std::iota(starts.begin(), starts.end(), 0);
    std::vector<bf16> q;
    for (const int32_t t : order) {
      q.insert(q.end(), p.q.data() + t * p.q_token, p.q.data() + t * p.q_token + c.heads * d);
      indices.insert(indices.end(), p.lists[0]->indices->data() + t * width,
                     p.lists[0]->indices->data() + (t + 1) * width);
    }
    Guarded<bf16> queries(q);
    Guarded<int32_t> lists(indices);
    plan.refill({.query_starts = starts, .seq_lens = lens});
    const testing::DeviceWorkspace workspace(plan.options().target.device, plan.workspace_bytes());
    AttendArgs a = p.args();
    a.plan = &plan;
    a.q = tensor(queries.data(), {n, c.heads, d});
    a.lists[0].indices = tensor(lists.data(), {n, width});
    r.attach(a);
    a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
    attend(a);
    EXPECT_TRUE(testing::device_finished());
  }
};

class AttendPlans : public AttendOnCpu {};  // on every device

TEST_P(AttendPlans, FixedSplitIsTheSameInAnyBatch) {
  Case c{.name = "", .tokens = 7, .heads = 5, .list = {{CacheFormat::kV32Fp8, 64, 3, 300}}};
  c.sink = true;
  Problem p(c);
  Answer want = p.expected();
  Plan plan(plan_options(c, testing::target("attend", GetParam()), SplitPolicy::kFixed));
  BatchRun all(p, plan, {0, 1, 2, 3, 4, 5, 6}, c);
  AttendArgs a = p.args();
  a.target = plan.options().target;
  all.r.attach(a);
  expect_close(a, want);
  const int64_t row = c.heads * kValueDim;
  for (const std::vector<int32_t>& order :
       {std::vector<int32_t>{3}, {6, 3}, {1, 1, 3, 0}, {5, 4, 2, 3, 3, 3, 3, 0, 1}}) {
    BatchRun some(p, plan, order, c);
    for (size_t i = 0; i < order.size(); ++i) {
      EXPECT_EQ(0, std::memcmp(some.r.out.data() + i * row, all.r.out.data() + order[i] * row,
                               row * sizeof(bf16)))
          << "token " << order[i] << " in a batch of " << order.size();
      EXPECT_EQ(0, std::memcmp(some.r.lse.data() + i * c.heads,
                               all.r.lse.data() + order[i] * c.heads, c.heads * sizeof(float)));
    }
  }
}

TEST_P(AttendPlans, BalancedPlan) {
  Case c{.name = "", .tokens = 5, .heads = 6, .list = {{CacheFormat::kV32Bf16, 64, 3, 200}}};
  Problem p(c);
  Answer want = p.expected();
  Plan plan(plan_options(c, testing::target("attend", GetParam()), SplitPolicy::kBalanced));
  BatchRun all(p, plan, {0, 1, 2, 3, 4}, c);
  AttendArgs a = p.args();
  a.target = plan.options().target;
  all.r.attach(a);
  expect_close(a, want);
}

// Runs a kernel with a schedule for any number of workers, whatever the pool has.
void run_with_workers(const std::string& name, Problem& p, const ScheduleShape& s, Results& r) {
  const Case& c = p.c;
  const auto kernels = internal::attend::kernels();
  const auto kernel = std::find_if(kernels.begin(), kernels.end(), [&](const auto& k) {
    return k.device == DeviceKind::kCpu && name == k.name;
  });
  std::vector<Tile> tiles(max_tiles(s));
  std::vector<int32_t> worker_starts(s.workers + 1), split_starts(c.tokens + 1);
  const internal::attend::Shape shape{.formats = {c.list[0].format, c.list[0].format},
                                      .heads = static_cast<int32_t>(c.heads),
                                      .tokens = c.tokens,
                                      .width = s.widths[0]};
  // Sized for the pool's threads: more workers need their share.
  std::vector<std::byte> workspace(kernel->workspace(shape, tiles.size()) * (s.workers + 1));
  internal::attend::Params params{.q = p.q.data(),
                                  .q_rope = p.q.data() + 512,
                                  .q_token_stride = p.q_token,
                                  .q_head_stride = p.q_head,
                                  .rope_token_stride = p.q_token,
                                  .rope_head_stride = p.q_head};
  params.lists[0] = {.indices = p.lists[0]->indices->data(),
                     .index_stride = s.widths[0],
                     .width = s.widths[0],
                     .page = c.list[0].page,
                     .data = static_cast<const std::byte*>(p.lists[0]->cache.data),
                     .page_stride = p.lists[0]->cache.page_stride,
                     .pages = c.list[0].pages,
                     .format = c.list[0].format};
  params.tokens = static_cast<int32_t>(c.tokens);
  params.heads = static_cast<int32_t>(c.heads);
  params.scale = c.scale;
  params.out = r.out.data();
  params.out_token_stride = r.token;
  params.out_head_stride = r.head;
  params.lse = r.lse.data();
  params.lse_token_stride = c.heads;
  params.lse_head_stride = 1;
  params.max_logit = r.max_logit.data();
  params.max_token_stride = c.heads;
  params.max_head_stride = 1;
  params.fixed_split = s.split == SplitPolicy::kFixed;
  params.schedule = make_schedule(s, {}, {tiles, worker_starts, split_starts});
  params.workspace = workspace;
  kernel->run(params);
}

// The same tiles, shared out to any number of workers, give the same bits.
TEST_P(AttendOnCpu, WorkersDoNotMatter) {
  Case c{.name = "", .tokens = 3, .heads = 5, .list = {{CacheFormat::kV32Bf16, 64, 3, 500}}};
  Problem p(c);
  std::vector<std::unique_ptr<Results>> results;
  for (const int32_t workers : {1, 2, 3, 7, 40}) {
    results.push_back(std::make_unique<Results>(c));
    Results& r = *results.back();
    run_with_workers(GetParam(), p,
                     {.tokens = c.tokens,
                      .widths = {500, 0},
                      .workers = workers,
                      .split = SplitPolicy::kFixed,
                      .split_size = 60},
                     r);
    EXPECT_EQ(0, std::memcmp(r.out.data(), results[0]->out.data(), r.out.size() * sizeof(bf16)))
        << workers << " workers";
    EXPECT_EQ(r.lse.values(), results[0]->lse.values()) << workers << " workers";
  }
}

// Many workers for a token: from eight on they share its heads as well as its keys.
TEST_P(AttendOnCpu, ManyWorkersForAToken) {
  for (const int32_t tokens : {1, 2}) {
    Case c{
        .name = "", .tokens = tokens, .heads = 70, .list = {{CacheFormat::kV32Bf16, 64, 3, 400}}};
    Problem p(c);
    Answer want = p.expected();
    for (const int32_t workers : {8, 17}) {
      SCOPED_TRACE(workers);
      Results r(c);
      run_with_workers(GetParam(), p, {.tokens = c.tokens, .widths = {400, 0}, .workers = workers},
                       r);
      AttendArgs a = p.args();
      r.attach(a);
      expect_close(a, want);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Kernels, AttendOnCpu, ::testing::ValuesIn(testing::cpu_kernels("attend")));
INSTANTIATE_TEST_SUITE_P(Kernels, AttendPlans, ::testing::ValuesIn(testing::kernels("attend")));

// ---- What a call refuses -------------------------------------------------------------------

class AttendErrors : public ::testing::Test {
 protected:
  AttendErrors() : p_(two_lists()), r_(p_.c), good_(p_.args()) { r_.attach(good_); }
  ~AttendErrors() override {
    for (const bf16 x : r_.out.values()) EXPECT_EQ(x.bits, 0xcdcd);  // nothing was written
  }
  static Case two_lists() {
    using enum CacheFormat;
    return {"", 3, 4, {{kV4Fp8, 64, 2, 10, true, true}, {kV4Bf16, 8, 3, 6, true}}, 2, true};
  }
  template <class F>
  void expect(F&& change, std::initializer_list<const char*> words,
              ErrorCode code = ErrorCode::kInvalidArgument) {
    AttendArgs a = good_;
    change(a);
    testing::expect_error([&] { attend(a); }, code, words);
  }

  Problem p_;
  Results r_;
  AttendArgs good_;
};

TEST_F(AttendErrors, Queries) {
  expect([](AttendArgs& a) { a.q = {}; }, {"attend", "q", "nothing"});
  expect([](AttendArgs& a) { a.q.dtype = DType::kF32; }, {"q", "bf16", "f32"});
  expect([](AttendArgs& a) { a.q.shape[2] = 576; }, {"q", "[any, any, 512]", "[3, 4, 576]"});
  expect([](AttendArgs& a) { a.q.shape[1] = 129; }, {"q (heads)", "1 to 128", "129"});
  expect([](AttendArgs& a) { a.q.shape[1] = 0; }, {"q (heads)", "0"});
  expect([](AttendArgs& a) { a.q.stride[2] = 2; }, {"q", "contiguous"});
  expect([](AttendArgs& a) { a.q.stride[0] = -1; }, {"q", "strides >= 0"});
  expect([](AttendArgs& a) { a.q_rope = a.q; }, {"q", "448", "512"});
  expect(
      [](AttendArgs& a) {
        a.q_rope = a.q;
        a.q.shape[2] = 448;
      },
      {"q_rope", "[3, 4, 64]", "[3, 4, 512]"});
}

TEST_F(AttendErrors, Lists) {
  expect([](AttendArgs& a) { a.lists = {}; }, {"lists[0]", "none"});
  expect([](AttendArgs& a) { a.lists[0].cache = {}; }, {"lists[0].cache", "none"});
  expect([](AttendArgs& a) { a.lists[0].cache.format = static_cast<CacheFormat>(9); },
         {"lists[0].cache", "number 9"});
  expect([](AttendArgs& a) { a.lists[0].cache.data = nullptr; }, {"lists[0].cache", "null"});
  expect([](AttendArgs& a) { a.lists[0].cache.page = 0; }, {"lists[0].cache"});
  expect([](AttendArgs& a) { a.lists[0].cache.page_stride = 576; },
         {"lists[0].cache", "page_stride", "37376", "576"});
  expect([](AttendArgs& a) { a.lists[0].cache.format = CacheFormat::kIndexKeys; },
         {"lists[0].cache", "latent"});
  expect(
      [](AttendArgs& a) {
        a.lists[1].cache.format = CacheFormat::kV32Bf16;
        a.lists[1].cache.page_stride = 0;
      },
      {"lists[1].cache", "v4", "v32_bf16"});
  expect([](AttendArgs& a) { a.lists[1].cache = {}; }, {"lists[1].cache", "none"});
  expect([](AttendArgs& a) { a.lists[1] = {.lengths = a.lists[0].lengths}; },
         {"lists[1].cache", "none"});
  expect([](AttendArgs& a) { a.lists[1] = {.block_table = a.lists[0].block_table}; },
         {"lists[1].cache", "none"});
  expect([](AttendArgs& a) { a.lists[1].cache.pages = int64_t{1} << 31; },
         {"lists[1].cache", "2147483647 slots"});
  expect([](AttendArgs& a) { a.lists[0].indices = {}; }, {"lists[0].indices", "nothing"});
  expect([](AttendArgs& a) { a.lists[0].indices.shape[0] = 2; },
         {"lists[0].indices", "[3, any]", "[2, 10]"});
  expect([](AttendArgs& a) { a.lists[1].indices.dtype = DType::kI64; },
         {"lists[1].indices", "int32", "int64"});
  expect([](AttendArgs& a) { a.lists[1].lengths.shape[0] = 4; },
         {"lists[1].lengths", "[3]", "[4]"});
  expect([](AttendArgs& a) { a.lists[0].block_table.rank = 1; }, {"lists[0].block_table"});
  expect([](AttendArgs& a) { a.requests = {}; }, {"requests", "logical ids", "nothing"});
  expect([](AttendArgs& a) { a.requests.shape[0] = 2; }, {"requests", "[3]", "[2]"});
}

TEST_F(AttendErrors, Results) {
  expect([](AttendArgs& a) { a.sink.shape[0] = 3; }, {"sink", "[4]", "[3]"});
  expect([](AttendArgs& a) { a.out = {}; }, {"out", "nothing"});
  expect([](AttendArgs& a) { a.out.shape[2] = 448; }, {"out", "[3, 4, 512]", "448"});
  expect([](AttendArgs& a) { a.out.dtype = DType::kI32; }, {"out", "bf16", "int32"});
  expect([](AttendArgs& a) { a.out.stride[1] = 0; }, {"out", "overlap"});
  expect([](AttendArgs& a) { a.lse.shape[1] = 3; }, {"lse", "[3, 4]", "[3, 3]"});
  expect([](AttendArgs& a) { a.max_logit.stride[0] = 1; }, {"max_logit", "overlap"});
  std::byte one[1];
  expect([](AttendArgs& a) { a.scale = AttendArgs{}.scale; },
         {"attend", "scale", "192^-1/2", "found none (NaN)"});
  expect([&](AttendArgs& a) { a.workspace = one; }, {"workspace", "at least", "found 1"});
  expect(
      [&](AttendArgs& a) {
        a.workspace = {static_cast<std::byte*>(nullptr), size_t{1} << 30};
      },
      {"attend", "workspace", "data", "null"});
  expect([](AttendArgs& a) { a.target.kernel = "fastest"; },
         {"attend", "no kernel fits", "simd", "reference"}, ErrorCode::kUnsupported);
}

TEST_F(AttendErrors, Plans) {
  Plan plan({.model = kV4,
             .format = CacheFormat::kV4Fp8,
             .heads = 4,
             .topk = 10,
             .extra_topk = 6,
             .pages = 4,
             .max_tokens = 8});
  std::vector<std::byte> workspace(plan.workspace_bytes());
  const auto with_plan = [&](AttendArgs& a) {
    a.plan = &plan;
    a.workspace = workspace;
  };
  const std::vector<int32_t> starts = {0, 1, 2, 3}, four = {0, 1, 2, 4}, lens = {9, 9, 9};
  plan.refill({.query_starts = four, .seq_lens = lens});
  expect(with_plan, {"plan", "3 tokens", "4"});
  plan.refill({.query_starts = starts, .seq_lens = lens});
  expect([&](AttendArgs& a) { with_plan(a), a.part = 1; }, {"part", "0 to 0", "1"});
  expect([&](AttendArgs& a) { with_plan(a), a.workspace = {}; }, {"workspace", "at least"});
  expect([&](AttendArgs& a) { with_plan(a), a.lists[1].indices = a.lists[0].indices; },
         {"lists (columns)", "at most 16", "20"});
  expect(
      [&](AttendArgs& a) {
        with_plan(a);
        a.sink = {};
        for (Tensor* t : {&a.q, &a.out, &a.lse, &a.max_logit}) t->shape[1] = 3;
      },
      {"plan", "3 heads", "4"});
}

}  // namespace
}  // namespace winnow
