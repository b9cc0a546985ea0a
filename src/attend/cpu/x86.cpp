#include "attend/cpu/kernels.h"

#include "cpu/isa.h"

namespace winnow::internal::attend::cpu {

std::string amx_machine() {
  const internal::cpu::Isa& isa = internal::cpu::isa();
#ifndef WINNOW_EMULATE_AMX  // a test may run the kernel's logic without the unit
  if (!isa.amx_bf16) return "this CPU has no AMX";
#endif
  return isa.avx512_vbmi ? "" : "this CPU has no AVX-512 VBMI";
}

std::string avx512bf16_machine() {
  const internal::cpu::Isa& isa = internal::cpu::isa();
  return !isa.avx512_bf16   ? "this CPU has no AVX-512 BF16"
         : !isa.avx512_vbmi ? "this CPU has no AVX-512 VBMI"
                            : "";
}

std::string avx512_machine() {
  return internal::cpu::isa().avx512 ? "" : "this CPU has no AVX-512 (F, BW, DQ, VL)";
}

bool bf16_dot_is_fast() { return !internal::cpu::isa().intel; }

// After a long stream, as of weights, Zen 5's L2 gives lines of prefetcht1 away before they are
// used; those of prefetcht0 stay: 0.7 of a cold token's time with 16 heads.
bool fetch_near() {
#ifdef WINNOW_EMULATE_AMX  // the same tests once more: what other CPUs do
  return !internal::cpu::isa().zen5;
#else
  return internal::cpu::isa().zen5;
#endif
}

}  // namespace winnow::internal::attend::cpu
