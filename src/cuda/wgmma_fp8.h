// wgmma with e4m3 operands: A (64 keys x 32 bytes) from registers, B (N x 32 bytes, K-major,
// 128-byte swizzle) from shared memory, fp32 accumulators. One overload per N that the kernels use.
#pragma once

#include <cstdint>

namespace winnow::internal::cuda {

#define WINNOW_D8(i)                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define WINNOW_D32(i) WINNOW_D8(i), WINNOW_D8(i + 8), WINNOW_D8(i + 16), WINNOW_D8(i + 24)
#define WINNOW_N32_0                                                                           \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24," \
  "%25,%26,%27,%28,%29,%30,%31"
#define WINNOW_N32_1                                                                             \
  "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
  "%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WINNOW_N32_2                                                                             \
  "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86," \
  "%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WINNOW_N32_3                                                                            \
  "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114," \
  "%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

// d = a * b (+ d when accumulate).
__device__ __forceinline__ void wgmma_e4m3(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                           int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%37,0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {" WINNOW_N32_0
      "},{%32,%33,%34,%35},%36,p,1,1;\n}\n"
      : WINNOW_D32(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                           int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%69,0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" WINNOW_N32_0 "," WINNOW_N32_1
      "},{%64,%65,%66,%67},%68,p,1,1;\n}\n"
      : WINNOW_D32(0), WINNOW_D32(32)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[96], const uint32_t (&a)[4], uint64_t b,
                                           int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%101,0;\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {" WINNOW_N32_0 "," WINNOW_N32_1
      "," WINNOW_N32_2 "},{%96,%97,%98,%99},%100,p,1,1;\n}\n"
      : WINNOW_D32(0), WINNOW_D32(32), WINNOW_D32(64)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}
__device__ __forceinline__ void wgmma_e4m3(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                           int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p,%133,0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k32.f32.e4m3.e4m3 {" WINNOW_N32_0 "," WINNOW_N32_1
      "," WINNOW_N32_2 "," WINNOW_N32_3 "},{%128,%129,%130,%131},%132,p,1,1;\n}\n"
      : WINNOW_D32(0), WINNOW_D32(32), WINNOW_D32(64), WINNOW_D32(96)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

#undef WINNOW_D8
#undef WINNOW_D32
#undef WINNOW_N32_0
#undef WINNOW_N32_1
#undef WINNOW_N32_2
#undef WINNOW_N32_3

}  // namespace winnow::internal::cuda
