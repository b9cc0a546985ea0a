// Allocations that fail: every public call then throws winnow::Error, code kRuntime, and nothing
// else. Each allocation of a call fails in turn, once alone and once with all that come after it.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>

#include "testing.h"
#include "winnow/error.h"
#include "winnow/winnow.h"

namespace {
int64_t allocations_left = INT64_MAX;  // until one fails
bool fail_all_after = false;
bool one_failed = false;

bool this_one_fails() {
  if (allocations_left == 0) {
    if (!fail_all_after) allocations_left = INT64_MAX;
    one_failed = true;
    return true;
  }
  --allocations_left;
  return false;
}
}  // namespace

[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return this_one_fails() ? nullptr : std::malloc(bytes > 0 ? bytes : 1);
}
[[gnu::noinline]] void* operator new(size_t bytes) {
  if (void* p = operator new(bytes, std::nothrow)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace winnow {
namespace {

// What a run of `call` threw, as the test needs it: nothing here may allocate while memory fails.
enum class Outcome { kReturned, kInvalid, kNoMemory, kOther };

Outcome outcome_of(const std::function<void()>& call, int64_t allocations, bool all_after) {
  allocations_left = allocations;
  fail_all_after = all_after;
  one_failed = false;
  Outcome outcome = Outcome::kReturned;
  try {
    call();
  } catch (const Error& e) {
    outcome = e.code() == ErrorCode::kRuntime ? Outcome::kNoMemory : Outcome::kInvalid;
    if (outcome == Outcome::kNoMemory && !std::strstr(e.what(), "out of memory"))
      outcome = Outcome::kOther;
  } catch (...) {
    outcome = Outcome::kOther;
  }
  allocations_left = INT64_MAX;
  fail_all_after = false;
  return outcome;
}

// Fails every allocation of the call in turn; returns how many there were.
int64_t fail_each(const char* name, const std::function<void()>& call, Outcome with_memory) {
  EXPECT_EQ(outcome_of(call, INT64_MAX, false), with_memory) << name;
  int64_t n = 0;
  for (const bool all_after : {false, true})
    for (n = 0;; ++n) {
      const Outcome got = outcome_of(call, n, all_after);
      if (!one_failed) break;
      // A stream that writes a message gives up silently: the error stays what it was.
      EXPECT_TRUE(got == Outcome::kNoMemory || got == with_memory)
          << name << ", allocation " << n << ": outcome " << static_cast<int>(got);
    }
  return n;
}

TEST(NoMemory, PlansThrowAnError) {
  for (const Model& model : {kV32, kV4})
    for (const Mode mode : {Mode::kMixed, Mode::kSeparate}) {
      const PlanOptions o{.model = model,
                          .format = model.fp8,
                          .heads = 16,
                          .pages = 64,
                          .max_requests = 8,
                          .max_tokens = 64,
                          .mode = mode};
      EXPECT_GT(fail_each(
                    "plan", [&] { Plan plan(o); }, Outcome::kReturned),
                5);
    }
  const PlanOptions wrong{.heads = 0, .pages = 64};
  EXPECT_GT(fail_each(
                "wrong plan", [&] { Plan plan(wrong); }, Outcome::kInvalid),
            0);
}

TEST(NoMemory, RefillsLeaveThePlanAsItWas) {
  Plan plan({.heads = 16, .pages = 64, .max_requests = 8, .max_tokens = 64});
  const int32_t starts[] = {0, 1, 4}, lens[] = {9, 5}, wrong[] = {9, 1};
  plan.refill({starts, lens});
  EXPECT_GT(fail_each(
                "refill",
                [&] {
                  plan.refill({starts, wrong});
                },
                Outcome::kInvalid),
            0);
  EXPECT_EQ(plan.tokens(), 4);
  EXPECT_EQ(plan.seq_lens()[1], 5);
}

// Two ranks of which the other says what this one says.
class Echo final : public Communicator {
 public:
  int32_t rank() const noexcept override { return 0; }
  int32_t size() const noexcept override { return 2; }
  const char* name() const noexcept override { return "echo"; }
  bool takes(DeviceKind kind) const noexcept override { return kind == DeviceKind::kCpu; }
  void all_gather(const void* send, void* recv, size_t bytes, const Device&) override {
    exchange(send, recv, bytes);
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device&) override {
    exchange(send, recv, bytes);
  }
  void exchange(const void* send, void* recv, size_t bytes) override {
    std::memcpy(recv, send, bytes);
    std::memcpy(static_cast<std::byte*>(recv) + bytes, send, bytes);
  }
  void check() override {}
};

TEST(NoMemory, RefillsOverRanksAllocateNothing) {
  Echo comm;
  const int32_t starts[] = {0, 1, 20}, lens[] = {9, 30};
  for (const Spread spread : {Spread::kHeads, Spread::kContext, Spread::kQueries})
    for (const bool sharded : {false, true}) {
      if (sharded && spread != Spread::kQueries) continue;
      Plan plan({.heads = 16,
                 .pages = 64,
                 .max_requests = 8,
                 .max_tokens = 64,
                 .parallel = {.comm = &comm, .spread = spread, .sharded = sharded}});
      EXPECT_EQ(fail_each(
                    "refill",
                    [&] {
                      plan.refill({starts, lens});
                    },
                    Outcome::kReturned),
                0);
    }
}

TEST(NoMemory, CallsThrowAnErrorAndWriteNothing) {
  std::vector<std::byte> pages(page_bytes(CacheFormat::kV32Fp8, 64));
  const Cache cache{.data = pages.data(), .pages = 1, .page = 64};
  std::vector<bf16> q(2 * 16 * 576), out(2 * 16 * 512, bf16{0xcdcd});
  std::vector<int32_t> lists(2 * 8, 0), ids(2 * 8, -7);
  std::vector<float> logits(2 * 8);
  AttendArgs a{
      .q = tensor(q.data(), {2, 16, 576}), .scale = 1, .out = tensor(out.data(), {2, 16, 512})};
  a.lists[0] = {.cache = cache, .indices = tensor(lists.data(), {2, 8})};
  attend(a);  // starts the workers, who allocate for themselves
  AttendArgs wrong = a;
  wrong.q.shape[1] = 15;
  fail_each(
      "attend", [&] { attend(a); }, Outcome::kReturned);
  std::fill(out.begin(), out.end(), bf16{0xcdcd});
  fail_each(
      "wrong attend", [&] { attend(wrong); }, Outcome::kInvalid);
  for (const bf16 x : out) ASSERT_EQ(x.bits, 0xcdcd);
  const SelectArgs s{.logits = tensor(logits.data(), {2, 8}), .ids = tensor(ids.data(), {2, 8})};
  fail_each(
      "select", [&] { select(s); }, Outcome::kReturned);
  const int32_t lens[] = {5, 9, 2};
  fail_each(
      "chunks", [&] { prefill_chunks(lens, 10); }, Outcome::kReturned);
  fail_each(
      "support", [&] { support(); }, Outcome::kReturned);
  fail_each(
      "cpu_name", [&] { cpu_name(); }, Outcome::kReturned);
  fail_each(
      "model_of", [&] { model_of("v5"); }, Outcome::kInvalid);
}

// A message that there is no memory for is still an Error, of any verb.
TEST(NoMemory, RefusalsThrowAnError) {
  const std::pair<const char*, void (*)()> verbs[] = {
      {"write", [] { write({}); }},
      {"gather", [] { gather({}); }},
      {"join", [] { join({}); }},
      {"quantize", [] { quantize({}); }},
      {"score", [] { score({}); }},
      {"score_select", [] { score_select({}); }},
      {"select", [] { select({}); }},
      {"locate", [] { locate({}); }},
      {"attend", [] { attend({}); }},
      {"attend_mha", [] { attend_mha({}); }},
      {"topk_mask", [] { topk_mask({}); }},
      {"merge", [] { merge({}); }},
      {"compressed_slots", [] { compressed_slots({}); }},
      {"c128a_lists", [] { c128a_lists({}); }},
      {"window_lists", [] { window_lists({}); }},
      {"combined_lists", [] { combined_lists({}); }},
      {"dequantize_weight", [] { dequantize_weight({}); }},
      {"split_kv_b", [] { split_kv_b({}); }},
      {"absorb_query", [] { absorb_query({}); }},
      {"project_output", [] { project_output({}); }},
      {"decompress", [] { decompress({}); }},
      {"pipeline", [] { pipeline({}); }},
      {"norm", [] { norm(NormArgs()); }},
      {"rotate", [] { rotate({}); }},
      {"rope_table", [] { rope_table({}); }},
      {"prepare_query", [] { prepare_query({}); }},
      {"index_query", [] { index_query({}); }},
      {"compress", [] { compress({}); }},
      {"norm_write", [] { norm_write(NormWriteArgs()); }},
      {"prepare_queries", [] { prepare_queries({}); }},
  };
  for (const auto& [name, call] : verbs)
    EXPECT_GT(fail_each(name, call, Outcome::kInvalid), 0) << name;
}

}  // namespace
}  // namespace winnow
