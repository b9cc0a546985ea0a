// What this CPU can do, read once.
#pragma once

#include <string>

namespace winnow::internal::cpu {

struct Isa {
  bool avx2 = false;    // with FMA and F16C
  bool avx512 = false;  // F, BW, DQ, VL
  bool avx512_vbmi = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;  // tiles, bf16, and the operating system lets us use them
  bool neon = false;
  bool intel = false;         // VDPBF16PS is slower than FMA on Intel's AMX generations
  int family = 0, model = 0;  // of x86 CPUs, with their extensions; 0: not known
  bool zen5 = false;          // AMD's family 26, or a later one
  std::string name;           // "AMD EPYC ..."
};

const Isa& isa();

}  // namespace winnow::internal::cpu
