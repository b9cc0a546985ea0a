#include "cpu/isa.h"

#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "core/check.h"
#include "core/made_once.h"
#include "winnow/support.h"

namespace winnow::internal::cpu {

namespace {

#if defined(__x86_64__)

// Linux hands out the 8 KB tile state on request, once per process.
bool ask_for_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

Isa detect() {
  Isa r;
  unsigned a = 0, b = 0, c = 0, d = 0;
  char vendor[13] = {};
  __get_cpuid(0, &a, &b, &c, &d);
  std::memcpy(vendor, &b, 4);
  std::memcpy(vendor + 4, &d, 4);
  std::memcpy(vendor + 8, &c, 4);
  r.intel = std::strcmp(vendor, "GenuineIntel") == 0;
  if (std::strcmp(vendor, "AuthenticAMD") == 0 && __get_cpuid(1, &a, &b, &c, &d)) {
    const unsigned family = (a >> 8 & 0xf) + (a >> 20 & 0xff);
    r.zen5 = family >= 26;
  }
  // __builtin_cpu_supports also checks that the operating system saves the registers.
  r.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  r.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  r.avx512_vbmi = r.avx512 && __builtin_cpu_supports("avx512vbmi");
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) r.avx512_bf16 = r.avx512 && (a >> 5 & 1);
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
    r.amx_bf16 = r.avx512_bf16 && (d >> 22 & 1) && (d >> 24 & 1) && ask_for_tiles();
  char brand[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    if (!__get_cpuid(0x80000002u + i, &a, &b, &c, &d)) break;
    const unsigned words[4] = {a, b, c, d};
    std::memcpy(brand + 16 * i, words, 16);
  }
  r.name = brand;
  return r;
}

#else

Isa detect() {
  Isa r;
#if defined(__aarch64__)
  r.neon = true;
#endif
  r.name = "CPU";
  return r;
}

#endif

}  // namespace

const Isa& isa() {
  static std::atomic<const Isa*> found{nullptr};
  return made_once(found, detect);
}

}  // namespace winnow::internal::cpu

namespace winnow {

std::string cpu_name() try {
  const internal::cpu::Isa& i = internal::cpu::isa();
  std::string s = i.name.substr(0, i.name.find_last_not_of(' ') + 1) + " (";
  const char* sep = "";
  for (const auto& [has, name] : {std::pair{i.avx2, "AVX2"},
                                  {i.avx512, "AVX-512"},
                                  {i.avx512_bf16, "AVX-512 BF16"},
                                  {i.amx_bf16, "AMX"},
                                  {i.neon, "NEON"}})
    if (has) {
      s += sep + std::string(name);
      sep = ", ";
    }
  return s + ")";
} catch (const std::bad_alloc&) {
  out_of_memory("support");
}

}  // namespace winnow
