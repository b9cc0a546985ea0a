// Warps, blocks and launches while they run.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <span>

#include "emulated/machine.h"
#include "emulated/matrix.h"
#include "emulated/ptx.h"

namespace winnow::emulated {

struct Launch;
struct Block;
struct Warp;

// A function's registers, for the lanes of a warp that are in one call of it.
struct Frame {
  const Function* function = nullptr;
  Frame* caller = nullptr;
  int32_t return_to = 0;  // in the caller
  const Instruction* call = nullptr;
  int depth = 0;
  uint32_t lanes = 0;  // that have not returned
  std::vector<uint32_t> registers;
  std::vector<uint32_t> predicates;
  std::vector<std::byte> memory;  // of each lane, lane_bytes each

  std::byte* lane_memory(int lane) { return memory.data() + lane * function->lane_bytes; }
};

// Lanes of a warp that are at the same instruction.
struct Group {
  Frame* frame = nullptr;
  uint32_t mask = 0;
  int32_t pc = 0;
  bool parked = false;  // waits for other lanes of the warp
};

// What a warp has given to the asynchronous units.
struct Deferred {
  int group = 0;  // committed groups before it
  uint32_t lanes = 0;
  std::function<void()> run;
};
struct DeferredQueue {
  int committed = 0;
  std::deque<Deferred> queue;
  // Runs what belongs to all but the last `left` committed groups, and to what is not committed if
  // `all`.
  void drain(int left, bool all = false);
};

enum SpecialRegister {
  kTidX,
  kTidY,
  kTidZ,
  kNtidX,
  kNtidY,
  kNtidZ,
  kCtaidX,
  kCtaidY,
  kCtaidZ,
  kNctaidX,
  kNctaidY,
  kNctaidZ,
  kLaneid,
  kWarpid,
  kSmid,
  kClusterRank,
  kClusterSizeX,
  kClusterSizeY,
  kClusterSizeZ,
  kClusteridX,
  kClusteridY,
  kClusteridZ,
  kNclusteridX,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kLanemaskEq,
  kDynamicSharedSize,
  kClock,
  kClock64,
  kGlobaltimer,
  kGridid,
  kSpecialRegisters,
};
int special_register(std::string_view name);  // -1: none

struct Warp {
  Block* block = nullptr;
  int index = 0;
  uint32_t live = 0;
  std::vector<Group> groups;
  std::vector<std::unique_ptr<Frame>> frames;
  uint32_t special[kSpecialRegisters][32] = {};
  size_t turn = 0;       // the group that ran last
  bool yielded = false;  // it waited for something
  DeferredQueue copies, stores, products;
  uint64_t carry = 0;  // of add.cc, a bit a lane
  // Lanes that have arrived at a named barrier and wait, and how often it, and the cluster's, had
  // opened when they came.
  uint32_t at_barrier = 0;
  uint32_t round[32] = {}, cluster_round[32] = {};
};

// A named barrier, or that of a cluster: who has arrived, and how often it has opened.
struct NamedBarrier {
  uint32_t arrived = 0, expected = 0, opened = 0;
  uint32_t yes = 0;
  uint32_t last_votes = 0, last_yes = 0;  // of the last round
};

struct Block {
  Launch* launch = nullptr;
  uint64_t number = 0;
  uint32_t at[3] = {};
  int rank = 0;  // in its cluster
  std::vector<std::byte> memory;
  std::byte* shared = nullptr;
  size_t shared_bytes = 0;
  int64_t dynamic = 0;  // where dynamic shared memory begins
  std::vector<std::unique_ptr<Warp>> warps;
  uint32_t threads = 0, exited = 0;
  NamedBarrier barriers[16];
  struct Cluster* in = nullptr;

  SharedBytes shared_view() { return {shared, shared_bytes}; }
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  uint32_t threads = 0, exited = 0;
  NamedBarrier barrier;
};

struct Launch {
  Program& program;
  const Function& kernel;
  LaunchConfig config;
  std::span<const std::byte> parameters;
  std::mt19937_64 random;
  std::vector<std::unique_ptr<Cluster>> clusters;
  uint64_t next_cluster = 0, all_clusters = 0, clock = 0;
  uint64_t progress = 0;  // counts what others may wait for
  struct Pending {
    uint64_t due;
    Block* block;
    std::function<void()> run;
  };
  std::vector<Pending> pending;

  // Has it run some time later.
  void later(Block* block, std::function<void()> run);
  // All that is pending for a block, at once.
  void finish(Block* block);
  void run();

 private:
  void start_clusters();
  bool turn(Warp& warp);
  void run_pending();
};

// What a handler sees: the lanes that it runs for.
struct Step {
  Launch& launch;
  Warp& warp;
  Frame* frame;
  uint32_t mask;
  int32_t pc;
  // What a handler may ask for: to try the instruction again later, with all lanes of the warp
  // there first (`park`), or the end of the lanes.
  bool retry = false, park = false, yield = false, jumped = false;

  Block& block() { return *warp.block; }
  const Operand& operand(const Instruction& i, int k) const {
    return frame->function->operands[i.first + k];
  }
  const Operand& part(const Operand& vector, int k) const {
    return frame->function->operands[vector.at + k];
  }
  [[noreturn]] void fail(const Instruction& i, const std::string& why, int lane = -1,
                         bool outside = false);

  // 32 lanes of an operand, as 32 or 64 bits each.
  const uint32_t* words(const Operand& o) const {
    switch (o.kind) {
      case Operand::kConstant:
        return frame->function->constant_lanes.data() + frame->function->constants.size() * 64 +
               o.at * 32;
      case Operand::kSpecial: return special(o.at);
      default: return frame->registers.data() + o.at;
    }
  }
  const uint64_t* wide(const Operand& o) const {
    if (o.kind == Operand::kConstant)
      return reinterpret_cast<const uint64_t*>(frame->function->constant_lanes.data()) + o.at * 32;
    return reinterpret_cast<const uint64_t*>(frame->registers.data() + o.at);
  }
  uint32_t* words_out(const Operand& o) { return frame->registers.data() + o.at; }
  uint64_t* wide_out(const Operand& o) {
    return reinterpret_cast<uint64_t*>(frame->registers.data() + o.at);
  }
  const uint32_t* special(int which) const;
  // A predicate operand as a bit for each lane; a constant 0 or 1 too.
  uint32_t predicate(const Operand& o) const;
  void set_predicate(const Operand& o, uint32_t bits) {
    if (o.kind != Operand::kPredicate) return;
    uint32_t& to = frame->predicates[o.at];
    to = (to & ~mask) | (bits & mask);
  }
  // A lane's value, of any register, constant or special register.
  uint64_t value(const Operand& o, int lane) const {
    if (o.kind == Operand::kConstant) return frame->function->constants[o.at];
    return o.wide ? wide(o)[lane] : words(o)[lane];
  }
  void set_value(const Operand& o, int lane, uint64_t x) {
    if (o.kind != Operand::kRegister) return;
    if (o.wide) wide_out(o)[lane] = x;
    else words_out(o)[lane] = static_cast<uint32_t>(x);
  }
  // The address that a memory operand or a symbol names, as a number in its space.
  uint64_t address(const Operand& o, int lane);
  // Host memory of it; fails where the kernel may not touch it.
  std::byte* memory(const Instruction& i, Space space, uint64_t address, size_t bytes, int lane);
  // Asks for all `lanes` (that live) to be at this instruction; false: not yet.
  bool all_here(uint32_t lanes) {
    if ((lanes & warp.live & ~mask) == 0) return true;
    retry = park = true;
    return false;
  }
  void wait_here() { retry = yield = true; }
};

template <class F>
inline void for_lanes(uint32_t mask, F&& f) {
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

// The mbarriers of shared memory.
void barrier_complete(Launch& launch, std::byte* barrier, int64_t bytes);
void barrier_arrive(Launch& launch, std::byte* barrier, uint32_t count);

// A shared address as kernels know it: bits 24 and up say which block of the cluster (rank + 1; 0:
// one's own).
inline constexpr int kRankShift = 24;
std::byte* shared_memory(Block& block, uint64_t address, size_t bytes);  // null: outside

}  // namespace winnow::emulated
