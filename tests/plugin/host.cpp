// Loads the plugin, calls it and unloads it, several times. winnow's pool must not run on in memory
// that dlclose() has taken away. An Error of the plugin's winnow is one that the host can catch,
// with no more of winnow than this header.
#include <dlfcn.h>
#include <winnow/error.h>

#include <chrono>
#include <cstdio>
#include <thread>

int main(int, char** argv) {
  for (int i = 0; i < 5; ++i) {
    void* plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!plugin) {
      std::fprintf(stderr, "%s\n", dlerror());
      return 2;
    }
    const auto first_output = reinterpret_cast<int (*)()>(dlsym(plugin, "first_output"));
    const int bits = first_output ? first_output() : 0;
    if (bits != 0x3f80) {  // the mean of ones
      std::fprintf(stderr, "expected 3f80, found %x\n", bits);
      return 1;
    }
    const auto refuse = reinterpret_cast<void (*)()>(dlsym(plugin, "refuse"));
    try {
      refuse();
      return 3;
    } catch (const winnow::Error& error) {
      if (error.code() != winnow::ErrorCode::kInvalidArgument) return 4;
    } catch (...) {
      std::fprintf(stderr, "the plugin's winnow::Error is not the host's\n");
      return 5;
    }
    dlclose(plugin);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the workers fall asleep
  }
  return 0;
}
