// A CUDA device that refuses: launches, pinned memory and events that fail, memory that is full, a
// context that a kernel has broken for good. Every case has a process of its own. The library then
// throws winnow::Error, code kRuntime, that names the stage; where the device recovers, the next
// call gives the right bits. The linker puts the functions here in front of CUDA's
// (CMakeLists.txt).
#include <gtest/gtest.h>

#ifndef WINNOW_WITH_CUDA

TEST(CudaFaults, AreNotInThisBuild) { GTEST_SKIP() << "built without CUDA (WINNOW_CUDA=OFF)"; }

#else

#include <cstdio>

#include "core/check.h"
#include "cuda/device.h"
#include "cuda_verbs.h"
#include "pipeline_problem.h"
#include "winnow/error.h"

namespace {

// The n-th from now on fails, once; below 0: none does.
int launches_left = -1, pinned_left = -1, events_left = -1;

// The kernel of the launch that failed last, and what CUDA said of it.
const char* failed_kernel = "";
cudaError_t failed_result = cudaSuccess;

bool fails(int& left) {
  if (left < 0) return false;
  return left-- == 0;
}

cudaError_t failed(const void* kernel, cudaError_t result) {
  failed_result = result;
  if (cudaFuncGetName(&failed_kernel, kernel) != cudaSuccess) failed_kernel = "?";
  return result;
}

}  // namespace

extern "C" {

// A launch that fails is one of no blocks: CUDA keeps the error as it does for any launch.
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** args);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** args) {
  if (!fails(launches_left)) return __real_cudaLaunchKernelExC(config, kernel, args);
  cudaLaunchConfig_t empty = *config;
  empty.gridDim = dim3(0, 0, 0);
  return failed(kernel, __real_cudaLaunchKernelExC(&empty, kernel, args));
}
cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                      size_t shared, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                      size_t shared, cudaStream_t stream) {
  if (!fails(launches_left))
    return __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
  return failed(kernel,
                __real___cudaLaunchKernel(kernel, dim3(0, 0, 0), block, args, shared, stream));
}
cudaError_t __real_cudaHostAlloc(void** memory, size_t bytes, unsigned flags);
cudaError_t __wrap_cudaHostAlloc(void** memory, size_t bytes, unsigned flags) {
  return fails(pinned_left) ? cudaErrorMemoryAllocation
                            : __real_cudaHostAlloc(memory, bytes, flags);
}
cudaError_t __real_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t __wrap_cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return fails(events_left) ? cudaErrorMemoryAllocation
                            : __real_cudaEventCreateWithFlags(event, flags);
}
}

namespace winnow::testing {
namespace {

using internal::core::cat;

// Ends the process of a case: with the line that failed, or 0.
#define ENSURE(condition)                                          \
  do {                                                             \
    if (!(condition)) {                                            \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
      _exit(1);                                                    \
    }                                                              \
  } while (false)

// What a call did: 0, or the code of the Error that it threw, which must name CUDA's error; -1 for
// anything else.
struct Outcome {
  int code = 0;
  std::string text = "success";
};
template <class F>
Outcome outcome_of(F&& call) {
  try {
    call();
    return {};
  } catch (const Error& e) {
    const std::string text = e.what();
    const bool says = text.find(": CUDA: cudaError") != std::string::npos;
    return {says ? static_cast<int>(e.code()) : -1, text};
  } catch (const std::exception& e) {
    return {-1, e.what()};
  }
}
constexpr int kRuntime = static_cast<int>(ErrorCode::kRuntime);

// All that went wrong in a case is printed before it ends: one run on a device tells it all.
int mistakes = 0;
void expect(bool right, const std::string& what, const Outcome& found) {
  if (right) return;
  ++mistakes;
  std::fprintf(stderr, "%s: %s\n", what.c_str(), found.text.c_str());
}

// Every launch of every verb fails in turn; then the verb gives the bits that it gave before.
void failing_launches() {
  for (const auto& [name, make] : verbs()) {
    const VerbPtr verb = make();
    verb->load(0);
    verb->run(cuda());
    const std::string want = verb->results();
    for (int n = 0; n < 64; ++n) {
      verb->load(0);
      launches_left = n;
      const Outcome outcome = outcome_of([&] { verb->run(cuda()); });
      const bool happened = launches_left < 0;
      launches_left = -1;
      if (!happened) {
        expect(outcome.code == 0 && n > 0, cat(name, ", after ", n, " launches"), outcome);
        break;
      }
      const std::string what = cat(name, ", launch ", n, " (", failed_kernel, ", ",
                                   cudaGetErrorName(failed_result), ")");
      expect(failed_result != cudaSuccess, what + " was not refused", outcome);
      expect(outcome.code == kRuntime, what, outcome);
      expect(cudaGetLastError() == cudaSuccess, what + " left CUDA's error behind", outcome);
    }
    verb->load(0);
    const Outcome again = outcome_of([&] { verb->run(cuda()); });
    expect(again.code == 0 && verb->results() == want, cat(name, ", again"), again);
  }
  ENSURE(mistakes == 0);
}

// Pinned memory and events of a plan.
void failing_plans() {
  const World world(layout_named("v32_mixed"), mixed_batch(), kPadding);
  PlanOptions options = world.options("sm90");
  for (int* left : {&pinned_left, &events_left})
    for (int n = 0; n < 8; ++n) {
      *left = n;
      const Outcome outcome = outcome_of([&] { Plan plan(options); });
      const bool happened = *left < 0;
      *left = -1;
      expect(outcome.code == (happened ? kRuntime : 0),
             cat(left == &pinned_left ? "pinned memory " : "event ", n), outcome);
      if (!happened) break;
    }
  Plan plan(options);
  plan.refill(world.batch());
  ENSURE(mistakes == 0);
}

// All of the device's memory that CUDA gives, for the life of the object.
class AllMemory {
 public:
  AllMemory() {
    for (size_t bytes = size_t{64} << 30; bytes >= size_t{1} << 20;) {
      void* p = nullptr;
      if (cudaMalloc(&p, bytes) == cudaSuccess) taken_.push_back(p);
      else bytes /= 2;
    }
    cudaGetLastError();
    void* more = nullptr;
    ENSURE(cudaMalloc(&more, size_t{64} << 20) != cudaSuccess);
    cudaGetLastError();
  }
  AllMemory(const AllMemory&) = delete;
  AllMemory& operator=(const AllMemory&) = delete;
  ~AllMemory() {
    for (void* p : taken_) cudaFree(p);
  }

 private:
  std::vector<void*> taken_;
};

Outcome make_plan() {
  return outcome_of([] { Plan({.pages = 8, .max_tokens = 8, .target = {.device = cuda()}}); });
}

// Calls over memory that they have need no more of it, once CUDA has loaded their kernels.
void full_memory() {
  struct Run {
    const char* name;
    VerbPtr verb;
    std::string want;
  };
  std::vector<Run> runs;
  for (const auto& [name, make] : verbs()) {
    runs.push_back({name, make(), ""});
    runs.back().verb->load(0);
    runs.back().verb->run(cuda());
    runs.back().want = runs.back().verb->results();
  }
  const auto all = [&](const char* when) {
    for (const Run& r : runs) {
      r.verb->load(0);
      const Outcome outcome = outcome_of([&] { r.verb->run(cuda()); });
      expect(outcome.code == 0 && r.verb->results() == r.want, cat(r.name, ", ", when), outcome);
    }
    const Outcome plan = make_plan();
    expect(plan.code == 0 || plan.code == kRuntime, cat("Plan, ", when), plan);
  };
  {
    const AllMemory taken;
    all("memory full");
  }
  all("memory free again");
  ENSURE(mistakes == 0);
}

// The memory is full when CUDA would load the kernels: a call does its work or says what the device
// lacks. CUDA may refuse such a kernel for good, and a call that meets this names the cause, too.
void full_memory_at_first() {
  std::vector<std::pair<const char*, VerbPtr> > runs;
  for (const auto& [name, make] : verbs()) runs.emplace_back(name, make());
  std::vector<std::string> bits(runs.size());
  const auto all = [&](const char* when) {
    for (size_t i = 0; i < runs.size(); ++i) {
      const auto& [name, verb] = runs[i];
      verb->load(0);
      const Outcome outcome = outcome_of([&, v = verb.get()] { v->run(cuda()); });
      std::fprintf(stderr, "%s, %s: %s\n", name, when, outcome.text.c_str());
      const bool explained = outcome.text.find("the device's memory") != std::string::npos;
      expect(outcome.code == 0 || (outcome.code == kRuntime && explained), cat(name, ", ", when),
             outcome);
      if (outcome.code != 0) continue;
      const std::string now = verb->results();
      expect(bits[i].empty() || now == bits[i], cat(name, ", ", when, ": other bits"), outcome);
      bits[i] = now;
    }
  };
  {
    const AllMemory taken;
    all("memory full");
  }
  all("memory free again");
  ENSURE(mistakes == 0);
}

// A kernel that read where nothing is: nothing runs in this context again. Every call says so,
// plans too, objects can be destroyed, and CPU calls go on.
void broken_context() {
  const VerbPtr good = select_verb(3000, 64);
  Plan before({.pages = 8, .max_tokens = 8, .target = {.device = cuda()}});
  // Neither is memory, and they do not overlap.
  SelectArgs lie{.logits = tensor(reinterpret_cast<float*>(uintptr_t{64}), {4, 3000}),
                 .ids = tensor(reinterpret_cast<int32_t*>(uintptr_t{1} << 20), {4, 64}),
                 .target = {.device = cuda()}};
  select(lie);
  ENSURE(cudaDeviceSynchronize() != cudaSuccess);
  for (int i = 0; i < 3; ++i) {
    const Outcome outcome = outcome_of([&] { good->run(cuda()); });
    expect(outcome.code == kRuntime, "select", outcome);
  }
  const Outcome plan = make_plan();
  expect(plan.code == kRuntime, "Plan", plan);
  const std::vector<float> logits = {3, 1, 2};
  std::vector<int32_t> ids(2, -7);
  select({.logits = tensor(logits.data(), {1, 3}), .ids = tensor(ids.data(), {1, 2})});
  ENSURE(ids == std::vector<int32_t>({0, 2}));
  ENSURE(mistakes == 0);
}

struct Case {
  const char* name;
  void (*run)();
};
class CudaFaultsDeathTest : public ::testing::TestWithParam<Case> {};

TEST_P(CudaFaultsDeathTest, IsAnError) {
  const std::string why = allowed_skip(internal::cuda::missing(), expects_device());
  if (!why.empty()) GTEST_SKIP() << why;
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      {
        GetParam().run();
        _exit(0);
      },
      ::testing::ExitedWithCode(0), "");
}

constexpr Case kCases[] = {{"failing_launches", failing_launches},
                           {"failing_plans", failing_plans},
                           {"full_memory", full_memory},
                           {"full_memory_at_first", full_memory_at_first},
                           {"broken_context", broken_context}};
INSTANTIATE_TEST_SUITE_P(Cases, CudaFaultsDeathTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace winnow::testing

#endif
