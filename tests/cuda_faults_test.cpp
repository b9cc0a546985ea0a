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

#include "cuda/device.h"
#include "cuda_verbs.h"
#include "pipeline_problem.h"
#include "winnow/error.h"

namespace {

// The n-th from now on fails, once; below 0: none does.
int launches_left = -1, pinned_left = -1, events_left = -1;

bool fails(int& left) {
  if (left < 0) return false;
  return left-- == 0;
}

}  // namespace

extern "C" {

// A launch that fails is one of no blocks: CUDA keeps the error as it does for any launch.
cudaError_t __real_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** args);
cudaError_t __wrap_cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel,
                                       void** args) {
  cudaLaunchConfig_t used = *config;
  if (fails(launches_left)) used.gridDim = dim3(0, 0, 0);
  return __real_cudaLaunchKernelExC(&used, kernel, args);
}
cudaError_t __real___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                      size_t shared, cudaStream_t stream);
cudaError_t __wrap___cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                                      size_t shared, cudaStream_t stream) {
  if (fails(launches_left)) grid = dim3(0, 0, 0);
  return __real___cudaLaunchKernel(kernel, grid, block, args, shared, stream);
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

// Ends the process of a case: with the line that failed, or 0.
#define ENSURE(condition)                                          \
  do {                                                             \
    if (!(condition)) {                                            \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
      _exit(1);                                                    \
    }                                                              \
  } while (false)

// 0, or the code of the Error that `call` threw; -1 for anything else, or without CUDA's message.
template <class F>
int code_of(F&& call) {
  try {
    call();
    return 0;
  } catch (const Error& e) {
    const bool says = std::string(e.what()).find("CUDA: ") != std::string::npos;
    return says ? static_cast<int>(e.code()) : -1;
  } catch (...) {
    return -1;
  }
}
constexpr int kRuntime = static_cast<int>(ErrorCode::kRuntime);

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
      const int code = code_of([&] { verb->run(cuda()); });
      const bool failed = launches_left < 0;
      launches_left = -1;
      if (!failed) {
        ENSURE(code == 0 && n > 0);
        break;
      }
      if (code != kRuntime) std::fprintf(stderr, "%s, launch %d: %d\n", name, n, code);
      ENSURE(code == kRuntime);
      ENSURE(cudaGetLastError() == cudaSuccess);
    }
    verb->load(0);
    verb->run(cuda());
    ENSURE(verb->results() == want);
  }
}

// Pinned memory and events of a plan.
void failing_plans() {
  const World world(layout_named("v32_mixed"), mixed_batch(), kPadding);
  PlanOptions options = world.options("sm90");
  for (int* left : {&pinned_left, &events_left})
    for (int n = 0; n < 8; ++n) {
      *left = n;
      const int code = code_of([&] { Plan plan(options); });
      const bool failed = *left < 0;
      *left = -1;
      ENSURE(code == (failed ? kRuntime : 0));
      if (!failed) break;
    }
  Plan plan(options);
  plan.refill(world.batch());
}

// All of the device's memory is taken: calls over memory that they have go on or say that they
// cannot; when it is given back they give the right bits.
void full_memory() {
  std::vector<std::pair<VerbPtr, std::string> > all;
  for (const auto& [name, make] : verbs()) all.emplace_back(make(), "");
  std::vector<void*> taken;
  for (size_t bytes = size_t{64} << 30; bytes >= size_t{1} << 20;) {
    void* p = nullptr;
    if (cudaMalloc(&p, bytes) == cudaSuccess) taken.push_back(p);
    else bytes /= 2;
  }
  cudaGetLastError();
  void* more = nullptr;
  ENSURE(cudaMalloc(&more, size_t{64} << 20) != cudaSuccess);
  cudaGetLastError();
  for (auto& [verb, bits] : all) {
    verb->load(0);
    const int code = code_of([&, v = verb.get()] { v->run(cuda()); });
    ENSURE(code == 0 || code == kRuntime);
    if (code == 0) bits = verb->results();
    ENSURE(code_of([&] { Plan({.pages = 8, .max_tokens = 8, .target = {.device = cuda()}}); }) >=
           0);
  }
  for (void* p : taken) cudaFree(p);
  for (auto& [verb, bits] : all) {
    verb->load(0);
    verb->run(cuda());
    const std::string now = verb->results();
    ENSURE(bits.empty() || now == bits);
  }
}

// A kernel that read where nothing is: nothing runs in this context again. Every call says so,
// plans too, objects can be destroyed, and CPU calls go on.
void broken_context() {
  const VerbPtr good = select_verb(3000, 64);
  Plan before({.pages = 8, .max_tokens = 8, .target = {.device = cuda()}});
  SelectArgs lie{.logits = tensor(reinterpret_cast<float*>(uintptr_t{64}), {4, 3000}),
                 .ids = tensor(reinterpret_cast<int32_t*>(uintptr_t{64}), {4, 64}),
                 .target = {.device = cuda()}};
  select(lie);
  ENSURE(cudaDeviceSynchronize() != cudaSuccess);
  for (int i = 0; i < 3; ++i) ENSURE(code_of([&] { good->run(cuda()); }) == kRuntime);
  ENSURE(code_of([&] { Plan({.pages = 8, .max_tokens = 8, .target = {.device = cuda()}}); }) ==
         kRuntime);
  const std::vector<float> logits = {3, 1, 2};
  std::vector<int32_t> ids(2, -7);
  select({.logits = tensor(logits.data(), {1, 3}), .ids = tensor(ids.data(), {1, 2})});
  ENSURE(ids == std::vector<int32_t>({0, 2}));
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
                           {"broken_context", broken_context}};
INSTANTIATE_TEST_SUITE_P(Cases, CudaFaultsDeathTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace winnow::testing

#endif
