// The machine by small kernels in PTX: what lanes compute, how they part and meet, and what it
// refuses.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "emulated/machine.h"
#include "emulated/memory.h"

namespace winnow::emulated {
namespace {

// Runs `body` as a kernel of one parameter, the address of `words` words, which it gives back.
// %rd1 is that address, %r1 the thread, %rd2 the address of the thread's word.
std::vector<uint32_t> run(const std::string& body, LaunchConfig config = {{1}, {32}, {}, 0, false},
                          const std::string& functions = "") {
  const std::string text = R"(.version 9.0
.target sm_90a
.address_size 64
.extern .shared .align 16 .b8 dynamic[];
)" + functions + R"(
.visible .entry k(.param .u64 k_param_0)
{
.reg .pred %p<9>;
.reg .b16 %rs<9>;
.reg .b32 %r<40>;
.reg .b64 %rd<20>;
.reg .f32 %f<20>;
ld.param.u64 %rd1, [k_param_0];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd2, %r1, 4;
add.s64 %rd2, %rd1, %rd2;
)" + body + R"(
ret;
}
)";
  std::vector<uint32_t> words(64, 0xffffffffu);
  add_memory(words.data(), words.size() * 4);
  const auto module = load_module(text);
  const uint64_t address = reinterpret_cast<uint64_t>(words.data());
  std::array<std::byte, 8> parameters;
  std::memcpy(parameters.data(), &address, 8);
  struct Removed {
    void* memory;
    ~Removed() { remove_memory(memory); }
  } removed{words.data()};
  module->run("k", config, parameters);
  return words;
}

std::string fault(const std::string& body, LaunchConfig config = {{1}, {32}, {}, 0, false}) {
  try {
    run(body, config);
  } catch (const Fault& e) {
    return e.what();
  }
  return "none";
}
bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(Ptx, LanesPartAndMeetAgain) {
  // Odd lanes go another way, in a loop of as many turns as their number; then all of them vote.
  const auto words = run(R"(
and.b32 %r2, %r1, 1;
setp.eq.s32 %p1, %r2, 0;
mov.u32 %r3, 0;
@%p1 bra EVEN;
LOOP: add.s32 %r3, %r3, 1;
setp.lt.s32 %p2, %r3, %r1;
@%p2 bra LOOP;
EVEN: vote.sync.ballot.b32 %r4, %p1, -1;
add.s32 %r3, %r3, %r4;
st.global.u32 [%rd2], %r3;
)");
  for (uint32_t lane = 0; lane < 32; ++lane)
    EXPECT_EQ(words[lane], 0x55555555u + (lane & 1 ? lane : 0)) << lane;
}

TEST(Ptx, ARegisterThatIsReadAndWrittenKeepsItsPlace) {
  // %r5 and %r6 are alive around the loop, though each is changed in place inside it.
  const auto words = run(R"(
mov.u32 %r5, 1;
mov.u32 %r6, 7;
mov.u32 %r7, 0;
LOOP: add.s32 %r8, %r7, 100;
xor.b32 %r5, %r5, 1;
add.s32 %r9, %r8, %r5;
add.s32 %r6, %r6, %r9;
add.s32 %r7, %r7, 1;
setp.lt.u32 %p1, %r7, 4;
@%p1 bra LOOP;
st.global.u32 [%rd2], %r6;
)");
  EXPECT_EQ(words[0], 7u + 100 + 102 + 102 + 104);
}

TEST(Ptx, ShufflesAsTheDeviceDoes) {
  const auto words = run(R"(
shfl.sync.up.b32 %r2|%p1, %r1, 3, 0, -1;
shfl.sync.bfly.b32 %r3, %r1, 5, 0x1f, -1;
shfl.sync.idx.b32 %r4, %r1, 9, 0x181f, -1;
selp.b32 %r5, 1000, 0, %p1;
mad.lo.s32 %r6, %r3, 100000, %r2;
mad.lo.s32 %r6, %r4, 3200000, %r6;
add.s32 %r6, %r6, %r5;
st.global.u32 [%rd2], %r6;
)");
  for (uint32_t lane = 0; lane < 32; ++lane) {
    const uint32_t up = lane >= 3 ? lane - 3 : lane, eight = lane & 24;
    EXPECT_EQ(words[lane],
              (lane ^ 5) * 100000 + up + (lane >= 3 ? 1000 : 0) + (eight | 1) * 3200000)
        << lane;
  }
}

TEST(Ptx, WideWordsCarriesAndBytes) {
  const auto words = run(R"(
.reg .b128 t;
.reg .b64 a, b;
mov.b64 a, 0x1122334455667788;
mov.b64 b, -2;
mov.b128 t, {a, b};
setp.eq.u32 %p1, %r1, 0;
@%p1 st.global.b128 [%rd1], t;
add.cc.u32 %r2, 0xffffffff, 2;
addc.u32 %r3, 5, 0;
prmt.b32 %r4, 0x33221100, 0x77665544, 0x9530;
setp.eq.u32 %p2, %r1, 4;
@%p2 st.global.v2.u32 [%rd2], {%r3, %r4};
ld.global.s32 %rd5, [%rd1+8];
shr.s64 %rd5, %rd5, 40;
setp.eq.u32 %p3, %r1, 6;
@%p3 st.global.u32 [%rd2], %rd5;
)");
  EXPECT_EQ(words[0], 0x55667788u);
  EXPECT_EQ(words[1], 0x11223344u);
  EXPECT_EQ(words[2], 0xfffffffeu);
  EXPECT_EQ(words[3], 0xffffffffu);
  EXPECT_EQ(words[4], 6u);
  EXPECT_EQ(words[5], 0x00553300u);
  EXPECT_EQ(words[6], 0xffffffffu);
}

TEST(Ptx, CallsHaveRegistersOfTheirOwn) {
  const auto words = run(R"(
and.b32 %r2, %r1, 3;
setp.ne.s32 %p1, %r2, 0;
mov.u32 %r3, 5;
@%p1 bra DONE;
{
.param .b32 param0;
st.param.b32 [param0+0], %r1;
.param .b32 retval0;
call.uni (retval0), twice, (param0);
ld.param.b32 %r3, [retval0+0];
}
DONE: st.global.u32 [%rd2], %r3;
)",
                         {{1}, {32}, {}, 0, false}, R"(
.func (.param .b32 func_retval0) twice(.param .b32 twice_param_0)
{
.reg .pred %p<2>;
.reg .b32 %r<9>;
ld.param.u32 %r3, [twice_param_0];
setp.gt.u32 %p1, %r3, 15;
@%p1 bra LARGE;
add.s32 %r4, %r3, %r3;
st.param.b32 [func_retval0+0], %r4;
ret;
LARGE: mov.u32 %r4, 99;
st.param.b32 [func_retval0+0], %r4;
ret;
}
)");
  for (uint32_t lane = 0; lane < 32; ++lane)
    EXPECT_EQ(words[lane], lane % 4 ? 5 : lane > 15 ? 99 : 2 * lane) << lane;
}

TEST(Ptx, BlocksMeetAtBarriersAndInClusters) {
  // Each of two blocks of two warps adds up its threads, and stores the sum at its peer.
  const auto words = run(R"(
.shared .align 8 .b8 sum[8];
.shared .align 8 .b8 peers[8];
mov.u32 %r2, sum;
mov.u32 %r3, peers;
setp.eq.u32 %p1, %r1, 0;
@%p1 st.shared.u32 [%r2], 0;
bar.sync 0;
atom.shared.add.u32 %r4, [%r2], %r1;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
mov.u32 %r5, %cluster_ctarank;
xor.b32 %r6, %r5, 1;
mapa.shared::cluster.u32 %r7, %r3, %r6;
ld.shared.u32 %r8, [%r2];
add.s32 %r8, %r8, %r5;
@%p1 st.shared::cluster.u32 [%r7], %r8;
barrier.cluster.arrive.aligned;
barrier.cluster.wait.aligned;
ld.shared.u32 %r9, [%r3];
mul.wide.u32 %rd3, %r5, 4;
add.s64 %rd3, %rd1, %rd3;
@%p1 st.global.u32 [%rd3], %r9;
)",
                         {{2}, {64}, {2}, 0, false});
  EXPECT_EQ(words[0], 64u * 63 / 2 + 1);
  EXPECT_EQ(words[1], 64u * 63 / 2);
}

TEST(Ptx, BulkCopiesCountOnTheirBarrier) {
  const auto words = run(R"(
.shared .align 16 .b8 row[64];
.shared .align 8 .b8 barrier[8];
mov.u32 %r2, row;
mov.u32 %r3, barrier;
add.s32 %r4, %r1, 7;
st.global.u32 [%rd2], %r4;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 1;
bar.sync 0;
@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 64;
@%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1], 64, [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
@!%p2 bra WAIT;
and.b32 %r5, %r1, 15;
shl.b32 %r5, %r5, 2;
add.s32 %r5, %r5, %r2;
ld.shared.u32 %r6, [%r5];
st.global.u32 [%rd2+128], %r6;
)");
  for (uint32_t lane = 0; lane < 32; ++lane) EXPECT_EQ(words[32 + lane], (lane & 15) + 7) << lane;
}

TEST(Ptx, SharedMemoryBeginsAsNaN) {
  const auto words =
      run("mov.u32 %r2, dynamic;\nld.shared.u32 %r3, [%r2+16];\n"
          "st.global.u32 [%rd2], %r3;",
          {{1}, {32}, {}, 64, false});
  EXPECT_EQ(words[5], 0xffffffffu);
}

TEST(PtxFaults, NameTheAddressAndTheThread) {
  const std::string behind = fault("st.global.u32 [%rd2+252], %r1;");
  EXPECT_TRUE(says(behind, "k: st.global.u32: memory that is not the kernel's: 4 bytes at"))
      << behind;
  EXPECT_TRUE(says(behind, "block (0, 0, 0), thread 1")) << behind;
  EXPECT_TRUE(says(fault("ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%rd1+8];"), "multiple of 16"));
  EXPECT_TRUE(says(fault("mov.u32 %r2, 0;\nld.shared.u32 %r3, [%r2];"), "shared memory at 0"));
  EXPECT_TRUE(
      says(fault("mov.u32 %r2, dynamic;\nst.shared.u32 [%r2+64], %r1;", {{1}, {32}, {}, 64, false}),
           "shared memory at"));
  EXPECT_TRUE(says(fault("mov.u32 %r2, dynamic;\nmapa.shared::cluster.u32 %r3, %r2, 1;\n"
                         "ld.shared::cluster.u32 %r4, [%r3];",
                         {{1}, {32}, {}, 64, false}),
                   "shared memory at"));
}

TEST(PtxFaults, BarriersThatNobodyOpens) {
  const std::string one_warp = fault(R"(
setp.lt.u32 %p1, %r1, 32;
@%p1 bar.sync 1, 64;
@!%p1 bar.sync 2, 64;
)",
                                     {{1}, {64}, {}, 0, false});
  EXPECT_TRUE(says(one_warp, "a deadlock")) << one_warp;
  EXPECT_TRUE(says(one_warp, "2 warps at bar.sync")) << one_warp;
  const std::string lanes = fault(
      "setp.lt.u32 %p1, %r1, 5;\n@%p1 bra A;\nbar.warp.sync -1;\nret;\n"
      "A: vote.sync.any.pred %p2, %p1, -1;");
  EXPECT_TRUE(says(lanes, "lanes of a warp wait for each other")) << lanes;
  const std::string counts = fault(R"(
setp.lt.u32 %p1, %r1, 32;
@%p1 barrier.sync 1, 64;
@!%p1 barrier.sync 1, 96;
)",
                                   {{1}, {64}, {}, 0, false});
  EXPECT_TRUE(says(counts, "a barrier of") && says(counts, "others expect")) << counts;
}

TEST(PtxFaults, ArrivalsBeyondWhatABarrierExpects) {
  const std::string text = fault(R"(
.shared .align 8 .b8 barrier[8];
mov.u32 %r3, barrier;
setp.eq.u32 %p1, %r1, 0;
@%p1 mbarrier.init.shared.b64 [%r3], 5;
@%p1 mbarrier.arrive.shared.b64 _, [%r3], 6;
)");
  EXPECT_TRUE(says(text, "more arrivals than an mbarrier expects")) << text;
}

TEST(PtxFaults, WhatItDoesNotKnow) {
  EXPECT_TRUE(
      says(fault("tanh.approx.f32 %f1, %f2;"), "does not know the instruction tanh.approx.f32"));
  EXPECT_TRUE(says(fault("bra NOWHERE;"), "no label or variable NOWHERE"));
  EXPECT_TRUE(says(fault("trap;"), "trap"));
}

}  // namespace
}  // namespace winnow::emulated
