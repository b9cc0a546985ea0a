#include "attend/x86.h"

#include "cpu/isa.h"

namespace winnow::attention {

std::string decode_amx_machine() {
  const host::Isa& isa = host::isa();
#ifndef WINNOW_EMULATE_AMX  // a test may run the kernel's logic without the unit
  if (!isa.amx_bf16) return "the CPU has no AMX";
#endif
  return isa.avx512_vbmi ? "" : "the CPU has no AVX-512 VBMI";
}

std::string decode_avx512bf16_machine() {
  const host::Isa& isa = host::isa();
  return !isa.avx512_bf16   ? "the CPU has no AVX-512 BF16"
         : !isa.avx512_vbmi ? "the CPU has no AVX-512 VBMI"
                            : "";
}

std::string decode_avx512_machine() {
  return host::isa().avx512 ? "" : "the CPU has no AVX-512 (F, BW, DQ, VL)";
}

bool bf16_dot_is_fast() { return !host::isa().intel; }

}  // namespace winnow::attention
