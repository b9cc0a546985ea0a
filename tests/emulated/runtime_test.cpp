// The CUDA runtime of the emulated device, over kernels that are functions of the host: this file
// has a load_module() of its own, which the linker takes instead of the interpreter's.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <map>
#include <thread>

#include "machine.h"
#include "memory.h"
#include "tensor_map.h"

extern "C" {
void** __cudaRegisterFatBinary(void*);
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, uint3*, uint3*, dim3*,
                            dim3*, int*);
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int);
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, cudaStream_t);
cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*);
cudaError_t __cudaGetKernel(cudaKernel_t*, const void*);
cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t);
}

namespace winnow::emulated {

namespace {

// The kernels' only parameters, at the offsets that PTX would give them.
struct Args {
  int32_t* to;
  int32_t value;
};
using Body = std::function<void(const LaunchConfig&, const Args&)>;
std::map<std::string, Body, std::less<>>& bodies() {
  static std::map<std::string, Body, std::less<>> all;
  return all;
}
std::string loaded_text;
int32_t variable[4];

class HostModule : public Module {
 public:
  bool has_kernel(std::string_view name) const override { return bodies().contains(name); }
  std::vector<Parameter> parameters(std::string_view) override { return {{0, 8}, {8, 4}}; }
  void* variable(std::string_view name) override {
    return name == "variable" ? emulated::variable : nullptr;
  }
  void run(std::string_view kernel, const LaunchConfig& config,
           std::span<const std::byte> parameters) override {
    Args args{};
    EXPECT_EQ(parameters.size(), 12u);
    std::memcpy(&args, parameters.data(), parameters.size());
    bodies().find(kernel)->second(config, args);
  }
};

}  // namespace

std::unique_ptr<Module> load_module(std::string_view ptx) {
  loaded_text = ptx;
  return std::make_unique<HostModule>();
}

namespace {

// What nvcc embeds, and its registration.
struct FatBinary {
  struct {
    uint32_t magic = 0x466243b1, version = 1;
    const void* data = nullptr;
    void* more = nullptr;
  } wrapper;
  std::string bytes;

  template <class T>
  void put(T value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void put_entry(uint16_t kind, const std::string& payload) {
    put(kind);
    put(uint16_t{0x101});
    put(uint32_t{24});
    put(uint64_t{payload.size()});
    put(uint64_t{0});
    bytes += payload;
  }
  // A fat binary of a cubin and of another entry.
  FatBinary(uint16_t kind, const std::string& payload, uint32_t magic = 0xba55ed50) {
    put(magic);
    put(uint16_t{1});
    put(uint16_t{16});
    put(uint64_t{2 * 24 + 8 + payload.size()});
    put_entry(2,
              "\x7f"
              "ELF....");
    put_entry(kind, payload);
    wrapper.data = bytes.data();
  }
  void** handle() { return __cudaRegisterFatBinary(&wrapper); }
};
const char* kText = "\n\n//\n.version 9.0\n.target sm_90a\n";
void** good_image() {
  static FatBinary* const image = new FatBinary(1, std::string(kText) + std::string(3, '\0'));
  static void** const handle = image->handle();
  return handle;
}

// The host's function of a kernel is its address alone.
const void* make_kernel(const char* name, Body body, void** image = good_image()) {
  auto* const host = new char;
  bodies()[name] = std::move(body);
  __cudaRegisterFunction(image, host, host, name, -1, nullptr, nullptr, nullptr, nullptr, nullptr);
  return host;
}
const void* storing_kernel() {
  static const void* const kernel =
      make_kernel("store", [](const LaunchConfig&, const Args& args) { *args.to = args.value; });
  return kernel;
}

cudaError_t launch(const void* kernel, int32_t* to, int32_t value, cudaStream_t stream = nullptr,
                   dim3 grid = 1, dim3 block = 32, size_t shared = 0) {
  void* args[] = {&to, &value};
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

// Memory of the device, which the host sees as well.
struct Word {
  int32_t* data = nullptr;
  Word() { EXPECT_EQ(cudaMalloc(reinterpret_cast<void**>(&data), sizeof *data), cudaSuccess); }
  ~Word() { cudaFree(data); }
  int32_t get() const { return *data; }
};
struct Stream {
  cudaStream_t get = nullptr;
  Stream() { EXPECT_EQ(cudaStreamCreateWithFlags(&get, cudaStreamNonBlocking), cudaSuccess); }
  ~Stream() { cudaStreamDestroy(get); }
};

bool reachable(const void* p, size_t bytes) { return holds(reinterpret_cast<uint64_t>(p), bytes); }

// ---- memory
// ---------------------------------------------------------------------------------------

TEST(EmulatedRuntime, MemoryIsPoisonedAndBounded) {
  for (const size_t bytes : {size_t{5}, size_t{100} << 20}) {
    std::byte* p = nullptr;
    size_t before = 0, after = 0, total = 0;
    ASSERT_EQ(cudaMemGetInfo(&before, &total), cudaSuccess);
    ASSERT_EQ(cudaMalloc(reinterpret_cast<void**>(&p), bytes), cudaSuccess);
    ASSERT_EQ(cudaMemGetInfo(&after, &total), cudaSuccess);
    EXPECT_EQ(before - after, bytes);
    EXPECT_EQ(total, 141'000'000'000u);
    for (const size_t at : {size_t{0}, bytes / 2, bytes - 1}) EXPECT_EQ(p[at], std::byte{0xff});
    EXPECT_TRUE(reachable(p, bytes));
    EXPECT_FALSE(reachable(p - 1, 1) || reachable(p + bytes, 1));
    EXPECT_EQ(cudaFreeHost(p), cudaErrorInvalidValue);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
    EXPECT_EQ(cudaFree(p), cudaSuccess);
    EXPECT_FALSE(reachable(p, 1));
    EXPECT_EQ(cudaFree(p), cudaErrorInvalidValue) << "freed twice";
    cudaGetLastError();
  }
}

// More than the machine has, until the device is full; the host's memory is another.
TEST(EmulatedRuntime, MemoryEnds) {
  void *half = nullptr, *more = nullptr, *pinned = nullptr;
  ASSERT_EQ(cudaMalloc(&half, size_t{100} << 30), cudaSuccess);
  EXPECT_EQ(cudaMalloc(&more, size_t{64} << 30), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaHostAlloc(&pinned, 1000, cudaHostAllocMapped), cudaSuccess);
  EXPECT_EQ(cudaFreeHost(pinned), cudaSuccess);
  EXPECT_EQ(cudaFree(half), cudaSuccess);
  EXPECT_EQ(cudaFree(nullptr), cudaSuccess);
}

TEST(EmulatedRuntime, CopiesStayInside) {
  const Word a, b;
  int32_t host = 7;
  EXPECT_EQ(cudaMemcpy(a.data, &host, 4, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(b.data, a.data, 4, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT_EQ(b.get(), 7);
  EXPECT_EQ(cudaMemset(b.data, 0, 4), cudaSuccess);
  EXPECT_EQ(b.get(), 0);
  EXPECT_EQ(cudaMemcpy(a.data, &host, 5, cudaMemcpyDefault), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(&host, a.data, 4, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemset(a.data, 0, 5), cudaErrorInvalidValue);
  int32_t rows[3][2] = {{1, 2}, {3, 4}, {5, 6}}, *to = nullptr;
  ASSERT_EQ(cudaMallocManaged(reinterpret_cast<void**>(&to), 36, cudaMemAttachGlobal), cudaSuccess);
  EXPECT_EQ(cudaMemcpy2DAsync(to, 12, rows, 8, 8, 3, cudaMemcpyDefault, nullptr), cudaSuccess);
  EXPECT_EQ(to[0], 1);
  EXPECT_EQ(to[2], -1);
  EXPECT_EQ(to[7], 6);
  EXPECT_EQ(cudaMemcpy2DAsync(to, 4, rows, 8, 8, 3, cudaMemcpyDefault, nullptr),
            cudaErrorInvalidPitchValue);
  cudaFree(to);
  cudaGetLastError();
}

TEST(EmulatedRuntime, WritesVariables) {
  static char symbol;
  __cudaRegisterVar(good_image(), &symbol, &symbol, "variable", 0, sizeof variable, 0, 0);
  add_memory(variable, sizeof variable);
  const int32_t value = 5;
  EXPECT_EQ(cudaMemcpyToSymbol(&symbol, &value, 4, 8, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(variable[2], 5);
  EXPECT_EQ(cudaMemcpyToSymbol(&symbol, &value, 4, 16, cudaMemcpyHostToDevice),
            cudaErrorInvalidSymbol);
  remove_memory(variable);
  cudaGetLastError();
}

// ---- launches
// -------------------------------------------------------------------------------------

TEST(EmulatedRuntime, LaunchesWhatIsRegistered) {
  const Word word;
  EXPECT_EQ(launch(storing_kernel(), word.data, 3), cudaSuccess);
  EXPECT_EQ(word.get(), 3);
  EXPECT_EQ(loaded_text, kText) << "without the zeros behind it";
  // As generated code launches: by a handle, of which the name can be asked, too.
  cudaKernel_t kernel = nullptr;
  ASSERT_EQ(__cudaGetKernel(&kernel, storing_kernel()), cudaSuccess);
  const char* name = nullptr;
  EXPECT_EQ(cudaFuncGetName(&name, kernel), cudaSuccess);
  EXPECT_STREQ(name, "store");
  __cudaPushCallConfiguration(2, dim3(64, 2), 16, nullptr);
  dim3 grid, block;
  size_t shared = 0;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(__cudaPopCallConfiguration(&grid, &block, &shared, &stream), cudaSuccess);
  EXPECT_EQ(block.y, 2u);
  EXPECT_EQ(shared, 16u);
  int32_t* to = word.data;
  int32_t value = 4;
  void* args[] = {&to, &value};
  EXPECT_EQ(__cudaLaunchKernel(kernel, grid, block, args, shared, stream), cudaSuccess);
  EXPECT_EQ(word.get(), 4);
  EXPECT_EQ(launch(&word, to, 0), cudaErrorInvalidDeviceFunction);
  cudaGetLastError();
}

TEST(EmulatedRuntime, RefusesLaunches) {
  const Word word;
  const auto kernel = make_kernel("limits", [](const LaunchConfig& config, const Args& args) {
    *args.to = static_cast<int32_t>(config.dynamic_shared + config.cluster.x);
  });
  const auto refused = [&](dim3 grid, dim3 block, size_t shared) {
    return launch(kernel, word.data, 0, nullptr, grid, block, shared);
  };
  EXPECT_EQ(refused(0, 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(refused(1, 1025, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(refused(dim3(1, 65536), 32, 0), cudaErrorInvalidConfiguration);
  EXPECT_EQ(refused(1, 32, 49153), cudaErrorInvalidValue);
  EXPECT_EQ(cudaPeekAtLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidValue);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  constexpr auto kShared = cudaFuncAttributeMaxDynamicSharedMemorySize;
  EXPECT_EQ(cudaFuncSetAttribute(kernel, kShared, kMostShared + 1), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFuncSetAttribute(kernel, kShared, kMostShared), cudaSuccess);
  EXPECT_EQ(refused(1, 32, kMostShared), cudaSuccess);
  EXPECT_EQ(word.get(), static_cast<int32_t>(kMostShared) + 1);

  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {16, 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = 112;
  config.blockDim = 32;
  config.dynamicSmemBytes = 200000;
  config.attrs = attributes;
  config.numAttrs = 1;
  int32_t *to = word.data, value = 0;
  void* args[] = {&to, &value};
  EXPECT_EQ(cudaLaunchKernelExC(&config, kernel, args), cudaErrorInvalidClusterSize);
  constexpr auto kClusters = cudaFuncAttributeNonPortableClusterSizeAllowed;
  EXPECT_EQ(cudaFuncSetAttribute(kernel, kClusters, 1), cudaSuccess);
  EXPECT_EQ(cudaLaunchKernelExC(&config, kernel, args), cudaSuccess);
  EXPECT_EQ(word.get(), 200016);
  int clusters = 0;
  EXPECT_EQ(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), cudaSuccess);
  EXPECT_EQ(clusters, 7);
  config.gridDim = 113;
  EXPECT_EQ(cudaLaunchKernelExC(&config, kernel, args), cudaErrorInvalidConfiguration);
  config.gridDim = 144;
  config.numAttrs = 2;
  EXPECT_EQ(cudaLaunchKernelExC(&config, kernel, args), cudaErrorCooperativeLaunchTooLarge);
  EXPECT_STREQ(cudaGetErrorName(cudaGetLastError()), "cudaErrorCooperativeLaunchTooLarge");
}

// A fat binary without PTX that can be read: the launch fails, and the device goes on.
TEST(EmulatedRuntime, SaysWhyThereIsNoPtx) {
  const auto said = [](const char* name, FatBinary image) {
    auto* const kept = new FatBinary(std::move(image));
    kept->wrapper.data = kept->bytes.data();
    const auto kernel = make_kernel(name, {}, kept->handle());
    ::testing::internal::CaptureStderr();
    EXPECT_EQ(launch(kernel, nullptr, 0), cudaErrorInvalidKernelImage);
    cudaGetLastError();
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(said("packed", {1, "\x28\xb5\x2f\xfd``"}).find("--no-compress"), std::string::npos);
  EXPECT_NE(said("cubin", {2, kText}).find("has no PTX"), std::string::npos);
  EXPECT_NE(said("other", {1, kText, 1}).find("of a kind that"), std::string::npos);
  FatBinary cut(1, kText);
  cut.bytes[16 + 24 + 8 + 8] += 1;
  EXPECT_NE(said("cut", cut).find("longer than"), std::string::npos);
}

// ---- streams, graphs
// ------------------------------------------------------------------------------

TEST(EmulatedRuntime, ReplaysWhatWasCaptured) {
  const Word a, b;
  const Stream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  cudaStreamCaptureStatus status{};
  *b.data = 0;
  ASSERT_EQ(cudaStreamBeginCapture(stream.get, cudaStreamCaptureModeGlobal), cudaSuccess);
  EXPECT_EQ(cudaStreamIsCapturing(stream.get, &status), cudaSuccess);
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_EQ(launch(storing_kernel(), a.data, 11, stream.get), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(b.data, a.data, 4, cudaMemcpyDefault, stream.get), cudaSuccess);
  EXPECT_EQ(b.get(), 0) << "ran while it was captured";
  EXPECT_EQ(launch(storing_kernel(), b.data, 12), cudaSuccess) << "another stream";
  EXPECT_EQ(b.get(), 12);
  ASSERT_EQ(cudaStreamEndCapture(stream.get, &graph), cudaSuccess);
  size_t nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_EQ(nodes, 2u);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  for (int i = 0; i < 2; ++i) {
    *a.data = *b.data = 0;
    EXPECT_EQ(cudaGraphLaunch(replay, stream.get), cudaSuccess);
    EXPECT_EQ(b.get(), 11);
  }
  EXPECT_EQ(cudaGraphExecDestroy(replay), cudaSuccess);
}

// What waits or allocates makes a capture invalid.
TEST(EmulatedRuntime, CapturesForbid) {
  const Stream stream;
  void* p = nullptr;
  const std::function<cudaError_t()> calls[] = {[&] { return cudaMalloc(&p, 1); },
                                                [&] { return cudaStreamSynchronize(stream.get); },
                                                [] { return cudaDeviceSynchronize(); }};
  for (const auto& forbidden : calls) {
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream.get, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    EXPECT_EQ(forbidden(), cudaErrorStreamCaptureUnsupported);
    EXPECT_EQ(launch(storing_kernel(), nullptr, 0, stream.get), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(cudaStreamEndCapture(stream.get, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
  }
  ASSERT_EQ(cudaStreamBeginCapture(stream.get, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  std::thread([] { const Word word; }).join();  // another thread may allocate
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream.get, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  cudaGetLastError();
}

TEST(EmulatedRuntime, LegacyStreamStaysOutOfCaptures) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  cudaStreamCaptureStatus status{};
  EXPECT_EQ(cudaStreamIsCapturing(nullptr, &status), cudaErrorStreamCaptureImplicit);
  EXPECT_EQ(launch(storing_kernel(), nullptr, 0), cudaErrorStreamCaptureImplicit);
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  EXPECT_EQ(launch(storing_kernel(), nullptr, 0, stream), cudaErrorInvalidResourceHandle);
  cudaGetLastError();
}

TEST(EmulatedRuntime, EventsAndHostFunctions) {
  cudaEvent_t begin = nullptr, end = nullptr, untimed = nullptr;
  ASSERT_EQ(cudaEventCreate(&begin), cudaSuccess);
  ASSERT_EQ(cudaEventCreate(&end), cudaSuccess);
  ASSERT_EQ(cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming), cudaSuccess);
  float time = -1;
  EXPECT_EQ(cudaEventElapsedTime(&time, begin, end), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaEventRecord(begin, nullptr), cudaSuccess);
  bool called = false;
  EXPECT_EQ(cudaLaunchHostFunc(
                nullptr, [](void* p) { *static_cast<bool*>(p) = true; }, &called),
            cudaSuccess);
  EXPECT_TRUE(called);
  EXPECT_EQ(cudaEventRecord(end, nullptr), cudaSuccess);
  EXPECT_EQ(cudaEventSynchronize(end), cudaSuccess);
  EXPECT_EQ(cudaEventElapsedTime(&time, begin, end), cudaSuccess);
  EXPECT_GE(time, 0.f);
  EXPECT_EQ(cudaEventSynchronize(untimed), cudaSuccess) << "never recorded";
  for (const cudaEvent_t event : {begin, end, untimed}) cudaEventDestroy(event);
  cudaGetLastError();
}

// ---- the device
// -----------------------------------------------------------------------------------

TEST(EmulatedRuntime, IsAnH200) {
  int value = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0), cudaSuccess);
  EXPECT_EQ(value, 132);
  EXPECT_EQ(cudaSetDevice(63), cudaErrorInvalidDevice);
  EXPECT_STREQ(cudaGetErrorString(cudaGetLastError()), "invalid device ordinal");
}

TEST(EmulatedRuntime, EncodesTensorMaps) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result{};
  ASSERT_EQ(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                             cudaEnableDefault, &result),
            cudaSuccess);
  ASSERT_EQ(result, cudaDriverEntryPointSuccess);
  const auto encode = [&](void* base, cuuint64_t stride, cuuint32_t width, CUtensorMap& map) {
    const cuuint64_t shape[] = {100, 7}, strides[] = {stride};
    const cuuint32_t box[] = {width, 8}, steps[] = {1, 1};
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)(
        &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, base, shape, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  alignas(16) char base[32];
  CUtensorMap map;
  ASSERT_EQ(encode(base, 208, 64, map), CUDA_SUCCESS);
  TensorMap read;
  std::memcpy(static_cast<void*>(&read), &map, sizeof read);
  EXPECT_EQ(read.magic, TensorMap::kMagic);
  EXPECT_EQ(read.rank, 2);
  EXPECT_EQ(read.element_bytes, 2);
  EXPECT_EQ(read.swizzle, 128);
  EXPECT_EQ(read.base, reinterpret_cast<uint64_t>(base));
  EXPECT_EQ(read.shape[1], 7u);
  EXPECT_EQ(read.box[0], 64u);
  EXPECT_EQ(read.stride[0], 2u);
  EXPECT_EQ(read.stride[1], 208u);
  EXPECT_EQ(encode(base + 8, 208, 64, map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, 200, 64, map), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(encode(base, 208, 72, map), CUDA_ERROR_INVALID_VALUE);
}

// ---- faults: each breaks the device for good, in a process of its own
// ------------------------------

template <class F>
void expect_broken(const char* name, cudaError_t error, const char* words, F fault) {
  ::testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto body = [&] {
    const Word before;
    const auto kernel = make_kernel(name, [&](const LaunchConfig&, const Args&) { fault(); });
    bool right = launch(kernel, before.data, 0) == cudaSuccess;  // found when somebody waits
    right = right && cudaGetLastError() == cudaSuccess;
    right = right && launch(storing_kernel(), before.data, 1) == cudaSuccess && before.get() == -1;
    right = right && cudaDeviceSynchronize() == error && cudaGetLastError() == error;
    void* p = nullptr;
    right = right && cudaMalloc(&p, 1) == error;
    right = right && launch(storing_kernel(), before.data, 1) == error && before.get() == -1;
    _exit(right ? 0 : 1);
  };
  EXPECT_EXIT(body(), ::testing::ExitedWithCode(0), words);
}

TEST(EmulatedRuntimeDeathTest, AFaultStays) {
  expect_broken("_ZN1a1bEv", cudaErrorLaunchFailure, "a::b\\(\\): it waits for nobody",
                [] { throw Fault("it waits for nobody"); });
}
TEST(EmulatedRuntimeDeathTest, AWildAddressStays) {
  expect_broken("wild", cudaErrorIllegalAddress, "wild: 0x40",
                [] { throw MemoryFault("0x40 is nobody's"); });
}

}  // namespace
}  // namespace winnow::emulated
