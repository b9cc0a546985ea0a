// Loads the plugin, calls it and unloads it, several times. winnow's pool must not run on in memory
// that dlclose() has taken away.
#include <dlfcn.h>

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
    dlclose(plugin);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the workers fall asleep
  }
  return 0;
}
