// Kernels of the CUDA runtime: what the code that nvcc generates registers and launches.
#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>

#include "runtime.h"

namespace winnow::emulated {

namespace {

struct Variable {
  Image* image;
  std::string name;
  size_t bytes;
};
// Never destroyed: programs launch from their own static objects' destructors. Addresses of kernels
// are handles.
struct Registered {
  std::map<const void*, Kernel> kernels;  // by the address of the host's function
  std::map<const void*, Variable> variables;
  std::set<const Kernel*> handles;
};
Registered& registered() {
  static auto* const all = new Registered;
  return *all;
}

// A kernel by the host's function or by its handle; null if there is none.
Kernel* find_kernel(const void* function) {
  Registered& all = registered();
  if (const auto found = all.kernels.find(function); found != all.kernels.end())
    return &found->second;
  const auto* const handle = static_cast<const Kernel*>(function);
  return all.handles.contains(handle) ? const_cast<Kernel*>(handle) : nullptr;
}

std::string demangled(const std::string& name) {
  int status = 0;
  char* const text = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  if (!text) return name;
  std::string result = text;
  std::free(text);
  return result;
}

// The configuration pushed by <<<>>> until the kernel's stub pops it.
struct Pushed {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Pushed> pushed;

// ---- launches
// -------------------------------------------------------------------------------------

struct Attributes {
  dim3 cluster{1, 1, 1};
  bool cooperative = false;
};
Attributes attributes_of(const cudaLaunchConfig_t& config) {
  Attributes result;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      const auto& dim = attribute.val.clusterDim;
      result.cluster = dim3(dim.x, dim.y, dim.z);
    } else if (attribute.id == cudaLaunchAttributeCooperative) {
      result.cooperative = attribute.val.cooperative != 0;
    }
  }
  return result;
}

uint64_t count(const dim3& d) { return uint64_t{d.x} * d.y * d.z; }

// Why the device refuses such a launch.
cudaError_t check_launch(const Kernel& kernel, const cudaLaunchConfig_t& config,
                         const Attributes& attributes) {
  const dim3 &grid = config.gridDim, &block = config.blockDim, &cluster = attributes.cluster;
  if (count(grid) == 0 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
    return cudaErrorInvalidConfiguration;
  if (count(block) == 0 || count(block) > 1024 || block.z > 64)
    return cudaErrorInvalidConfiguration;
  if (config.dynamicSmemBytes > kernel.most_dynamic_shared) return cudaErrorInvalidValue;
  const uint64_t most_blocks = kernel.non_portable_clusters ? 16 : 8;
  if (count(cluster) == 0 || count(cluster) > most_blocks) return cudaErrorInvalidClusterSize;
  if (grid.x % cluster.x || grid.y % cluster.y || grid.z % cluster.z)
    return cudaErrorInvalidConfiguration;
  if (attributes.cooperative &&
      count(grid) > kMultiprocessors * blocks_at_once(block, config.dynamicSmemBytes))
    return cudaErrorCooperativeLaunchTooLarge;
  return cudaSuccess;
}

std::vector<Parameter> parameters_of(const Kernel& kernel) {
  try {
    return kernel.image->module().parameters(kernel.name);
  } catch (const Fault& fault) {
    throw Fault(demangled(kernel.name) + ": " + fault.what());
  }
}

std::vector<std::byte> copied(const std::vector<Parameter>& parameters, void** args) {
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Parameter& p = parameters[i];
    bytes.resize(std::max(bytes.size(), p.offset + p.size));
    std::memcpy(bytes.data() + p.offset, args[i], p.size);
  }
  return bytes;
}

void run(const Kernel& kernel, const LaunchConfig& config, std::span<const std::byte> parameters) {
  const auto said = [&](const std::exception& e) {
    return demangled(kernel.name) + ": " + e.what();
  };
  try {
    kernel.image->module().run(kernel.name, config, parameters);
  } catch (const MemoryFault& fault) {
    break_device(cudaErrorIllegalAddress, said(fault));
  } catch (const std::exception& fault) {
    break_device(cudaErrorLaunchFailure, said(fault));
  }
}

cudaError_t launch(const void* function, const cudaLaunchConfig_t& config, void** args) {
  Kernel* const kernel = find_kernel(function);
  if (!kernel) return cudaErrorInvalidDeviceFunction;
  const Attributes attributes = attributes_of(config);
  if (const cudaError_t e = check_launch(*kernel, config, attributes)) return e;
  const std::vector<Parameter> parameters = parameters_of(*kernel);
  const auto dim = [](const dim3& d) { return Dim{d.x, d.y, d.z}; };
  const LaunchConfig run_config{.grid = dim(config.gridDim),
                                .block = dim(config.blockDim),
                                .cluster = dim(attributes.cluster),
                                .dynamic_shared = config.dynamicSmemBytes,
                                .cooperative = attributes.cooperative};
  return queue(config.stream, [kernel, run_config, bytes = copied(parameters, args)] {
    run(*kernel, run_config, bytes);
  });
}

}  // namespace

unsigned blocks_at_once(const dim3& block, size_t dynamic_shared) {
  constexpr uint64_t kThreads = 2048, kBlocks = 32;
  constexpr uint64_t kShared = 228 * 1024, kSharedOfSystem = 1024;  // bytes, of them in each block
  const uint64_t by_threads = kThreads / std::max<uint64_t>(count(block), 1);
  const uint64_t by_shared = kShared / (dynamic_shared + kSharedOfSystem);
  return static_cast<unsigned>(std::min({kBlocks, by_threads, by_shared}));
}

std::byte* variable_of(const void* symbol, size_t offset, size_t bytes) {
  const auto found = registered().variables.find(symbol);
  if (found == registered().variables.end()) return nullptr;
  const Variable& variable = found->second;
  if (offset > variable.bytes || bytes > variable.bytes - offset) return nullptr;
  void* const begin = variable.image->module().variable(variable.name);
  return begin ? static_cast<std::byte*>(begin) + offset : nullptr;
}

}  // namespace winnow::emulated

using namespace winnow::emulated;

extern "C" {

// ---- what generated code calls before main()
// ------------------------------------------------------

void** __cudaRegisterFatBinary(void* wrapper) {
  return reinterpret_cast<void**>(new Image(wrapper));
}
void __cudaRegisterFatBinaryEnd(void**) {}
// Kept: other static objects may still launch.
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

// An inline kernel is registered by every source that has it, for one address: the first one runs.
void __cudaRegisterFunction(void** image, const char* host, char*, const char* name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  const auto [at, is_new] =
      registered().kernels.emplace(host, Kernel{reinterpret_cast<Image*>(image), name});
  if (is_new) registered().handles.insert(&at->second);
}
void __cudaRegisterVar(void** image, char* host, char*, const char* name, int, size_t bytes, int,
                       int) {
  registered().variables.emplace(host, Variable{reinterpret_cast<Image*>(image), name, bytes});
}

// ---- launches
// -------------------------------------------------------------------------------------

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  pushed.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (pushed.empty()) return cudaErrorMissingConfiguration;
  const Pushed last = pushed.back();
  pushed.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return call(Waits::kNo, [&] {
    Kernel* const found = find_kernel(function);
    *kernel = reinterpret_cast<cudaKernel_t>(found);
    return found ? cudaSuccess : cudaErrorInvalidDeviceFunction;
  });
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function,
                                void** args) {
  return call(Waits::kNo,
              [&] { return config ? launch(function, *config, args) : cudaErrorInvalidValue; });
}
cudaError_t cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** args,
                             size_t shared, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return call(Waits::kNo, [&] { return launch(function, config, args); });
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, args, shared, stream);
}

// ---- kernels' attributes
// --------------------------------------------------------------------------

cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  return call(Waits::kNo, [&] {
    Kernel* const kernel = find_kernel(function);
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize) {
      if (value < 0 || static_cast<size_t>(value) > kMostShared) return cudaErrorInvalidValue;
      kernel->most_dynamic_shared = static_cast<size_t>(value);
    } else if (attribute == cudaFuncAttributeNonPortableClusterSizeAllowed) {
      kernel->non_portable_clusters = value != 0;
    } else {
      return cudaErrorInvalidValue;
    }
    return cudaSuccess;
  });
}
cudaError_t cudaFuncGetName(const char** name, const void* function) {
  return call(Waits::kNo, [&] {
    const Kernel* const kernel = find_kernel(function);
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (!name) return cudaErrorInvalidValue;
    *name = kernel->name.c_str();
    return cudaSuccess;
  });
}
// Of clusters of one block to a multiprocessor, as an H200 answers.
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void* function,
                                           const cudaLaunchConfig_t* config) {
  return call(Waits::kNo, [&] {
    constexpr int kClusters[16] = {132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7};
    const Kernel* const kernel = find_kernel(function);
    if (!kernel) return cudaErrorInvalidDeviceFunction;
    if (!clusters || !config) return cudaErrorInvalidValue;
    const Attributes attributes = attributes_of(*config);
    if (const cudaError_t e = check_launch(*kernel, *config, attributes)) return e;
    *clusters = kClusters[count(attributes.cluster) - 1];
    return cudaSuccess;
  });
}
}
