// What lanes, warps and blocks do together: shuffles, votes, barriers, matrix instructions.
#include <algorithm>
#include <bit>

#include "emulated/matrix.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

uint32_t member_mask(Step& s, const Operand& o) {
  return static_cast<uint32_t>(s.value(o, std::countr_zero(s.mask)));
}

// shfl.sync.MODE d{|p}, a, b, c, mask.
void shuffle(Step& s, const Instruction& i) {
  const bool has_predicate = i.count == 6;
  const int k = has_predicate ? 2 : 1;
  if (!s.all_here(member_mask(s, s.operand(i, k + 3)))) return;
  const uint32_t* a = s.words(s.operand(i, k));
  uint32_t from[32];
  std::copy_n(a, 32, from);
  uint32_t result[32] = {}, inside = 0;
  const std::string_view mode = part_of(i.name, 2);
  for_lanes(s.mask, [&](int lane) {
    const auto b = static_cast<uint32_t>(s.value(s.operand(i, k + 1), lane)) & 31;
    const auto c = static_cast<uint32_t>(s.value(s.operand(i, k + 2), lane));
    const int segment = static_cast<int>(c >> 8 & 31), clamp = static_cast<int>(c & 31);
    const int most = (lane & segment) | (clamp & ~segment), least = lane & segment;
    int j = lane;
    bool ok = false;
    if (mode == "up") {
      j = lane - static_cast<int>(b);
      ok = j >= most;
    } else if (mode == "down") {
      j = lane + static_cast<int>(b);
      ok = j <= most;
    } else if (mode == "bfly") {
      j = lane ^ static_cast<int>(b);
      ok = j <= most;
    } else {
      j = least | (static_cast<int>(b) & ~segment);
      ok = j <= most;
    }
    if (!ok) j = lane;
    result[lane] = from[j & 31];
    inside |= static_cast<uint32_t>(ok) << lane;
  });
  for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(i, 0), lane, result[lane]); });
  if (has_predicate) s.set_predicate(s.operand(i, 1), inside);
}

// vote.sync.MODE d, a, mask.
void vote(Step& s, const Instruction& i) {
  const uint32_t members = member_mask(s, s.operand(i, 2));
  if (!s.all_here(members)) return;
  const uint32_t yes = s.predicate(s.operand(i, 1)) & members & s.mask;
  const std::string_view mode = part_of(i.name, 2);
  if (mode == "ballot") {
    for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(i, 0), lane, yes); });
    return;
  }
  const uint32_t all = members & s.mask;
  const bool result = mode == "any"   ? yes != 0
                      : mode == "all" ? yes == all
                                      : yes == 0 || yes == all;
  s.set_predicate(s.operand(i, 0), result ? ~0u : 0);
}

void reduce(Step& s, const Instruction& i) {
  const uint32_t members = member_mask(s, s.operand(i, 2));
  if (!s.all_here(members)) return;
  const std::string_view how = part_of(i.name, 2);
  const bool is_signed = i.type == Type::kS32;
  uint32_t result = 0;
  bool first = true;
  for_lanes(members & s.mask, [&](int lane) {
    const auto x = static_cast<uint32_t>(s.value(s.operand(i, 1), lane));
    if (first) result = x;
    else if (how == "add") result += x;
    else if (how == "and") result &= x;
    else if (how == "or") result |= x;
    else if (how == "xor") result ^= x;
    else {
      const bool less =
          is_signed ? static_cast<int32_t>(x) < static_cast<int32_t>(result) : x < result;
      if (less == (how == "min")) result = x;
    }
    first = false;
  });
  for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(i, 0), lane, result); });
}

void match_any(Step& s, const Instruction& i) {
  if (!s.all_here(member_mask(s, s.operand(i, 2)))) return;
  uint32_t result[32] = {};
  for_lanes(s.mask, [&](int a) {
    for_lanes(s.mask, [&](int b) {
      if (s.value(s.operand(i, 1), a) == s.value(s.operand(i, 1), b)) result[a] |= 1u << b;
    });
  });
  for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(i, 0), lane, result[lane]); });
}

// elect.sync d|p, mask.
void elect(Step& s, const Instruction& i) {
  if (!s.all_here(member_mask(s, s.operand(i, 2)))) return;
  const int lane = std::countr_zero(s.mask);
  if (s.operand(i, 0).kind == Operand::kRegister)
    for_lanes(s.mask, [&](int l) { s.set_value(s.operand(i, 0), l, static_cast<uint64_t>(lane)); });
  s.set_predicate(s.operand(i, 1), 1u << lane);
}

void meet_in_warp(Step& s, const Instruction& i) { s.all_here(member_mask(s, s.operand(i, 0))); }

// bar and barrier: all threads, or so many, on one of 16. Each lane counts.
void named_barrier(Step& s, const Instruction& i) {
  const int k = part_of(i.name, 1) == "cta" ? 2 : 1;
  const std::string_view what = part_of(i.name, k);
  const bool reduces = what == "red";
  const bool aligned = part_of(i.name, 0) == "bar" || has_part(i.name, "aligned");
  if (aligned && !s.all_here(s.warp.live)) return;
  const int first = reduces ? 1 : 0, some_lane = std::countr_zero(s.mask);
  Block& block = s.block();
  NamedBarrier& b = block.barriers[s.value(s.operand(i, first), some_lane) & 15];
  const bool has_count = i.count == (reduces ? 4 : 2);
  const auto count =
      has_count ? static_cast<uint32_t>(s.value(s.operand(i, first + 1), some_lane)) : 0;
  if (const uint32_t coming = s.mask & ~s.warp.at_barrier) {
    if (count % 32 != 0) s.fail(i, "a barrier of " + std::to_string(count) + " threads");
    if (b.arrived == 0) b.expected = count;
    if (b.expected != count)
      s.fail(i, "a barrier of " + std::to_string(count) + " threads, others expect " +
                    std::to_string(b.expected));
    if (reduces)
      b.yes +=
          static_cast<uint32_t>(std::popcount(s.predicate(s.operand(i, i.count - 1)) & coming));
    b.arrived += static_cast<uint32_t>(std::popcount(coming));
    for_lanes(coming, [&](int lane) { s.warp.round[lane] = b.opened; });
    s.warp.at_barrier |= coming;
  }
  const bool closed = s.warp.round[some_lane] == b.opened;
  const uint32_t expected = b.expected ? b.expected : block.threads - block.exited;
  if (closed && b.arrived >= expected) {
    b.last_votes = b.arrived;
    b.last_yes = b.yes;
    b.arrived = b.yes = 0;
    ++b.opened;
    ++s.launch.progress;
  } else if (closed && what != "arrive") {
    return s.wait_here();
  }
  s.warp.at_barrier &= ~s.mask;
  if (!reduces) return;
  const std::string_view how = part_of(i.name, k + 1);
  if (how == "popc")
    for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(i, 0), lane, b.last_yes); });
  else
    s.set_predicate(s.operand(i, 0),
                    (how == "or" ? b.last_yes > 0 : b.last_yes == b.last_votes) ? ~0u : 0);
}

// barrier.cluster.arrive and .wait: all threads of the cluster that have not ended.
void cluster_barrier(Step& s, const Instruction& i) {
  if (has_part(i.name, "aligned") && !s.all_here(s.warp.live)) return;
  Cluster& cluster = *s.block().in;
  NamedBarrier& b = cluster.barrier;
  if (part_of(i.name, 2) == "arrive") {
    for_lanes(s.mask, [&](int lane) { s.warp.cluster_round[lane] = b.opened; });
    b.arrived += static_cast<uint32_t>(std::popcount(s.mask));
    ++s.launch.progress;
  }
  if (b.arrived > 0 && b.arrived + cluster.exited >= cluster.threads) {
    b.arrived = 0;
    ++b.opened;
    ++s.launch.progress;
  }
  if (part_of(i.name, 2) == "wait" && s.warp.cluster_round[std::countr_zero(s.mask)] == b.opened)
    s.wait_here();
}

// An mbarrier, as this machine keeps it in its eight bytes.
struct Mbarrier {
  uint64_t phase : 1, expected : 20, pending : 20, bytes : 23;  // bytes: with an offset
  static constexpr int64_t kNoBytes = 1 << 22;
};
Mbarrier read_barrier(const std::byte* at) {
  Mbarrier b;
  std::memcpy(&b, at, sizeof b);
  return b;
}
void update(Launch& launch, std::byte* at, Mbarrier b) {
  if (b.pending == 0 && static_cast<int64_t>(b.bytes) == Mbarrier::kNoBytes) {
    b.phase ^= 1;
    b.pending = b.expected;
    ++launch.progress;
  }
  std::memcpy(at, &b, sizeof b);
}

std::byte* barrier_of(Step& s, const Instruction& i, int k, int lane) {
  const uint64_t address = s.address(s.operand(i, k), lane);
  if (address % 8 != 0) s.fail(i, "an mbarrier that is not aligned", lane);
  return s.memory(i, Space::kShared, address, 8, lane);
}

void init_barrier(Step& s, const Instruction& i) {
  for_lanes(s.mask, [&](int lane) {
    const auto count = static_cast<uint32_t>(s.value(s.operand(i, 1), lane));
    if (count == 0 || count >= 1 << 20)
      s.fail(i, "an mbarrier of " + std::to_string(count) + " arrivals", lane);
    Mbarrier b{};
    b.expected = b.pending = count;
    b.bytes = Mbarrier::kNoBytes;
    std::memcpy(barrier_of(s, i, 0, lane), &b, sizeof b);
  });
}
// mbarrier.arrive{.expect_tx} {state|_}, [barrier]{, count}.
void arrive(Step& s, const Instruction& i) {
  const bool bytes = has_part(i.name, "expect_tx");
  for_lanes(s.mask, [&](int lane) {
    std::byte* const at = barrier_of(s, i, 1, lane);
    Mbarrier b = read_barrier(at);
    const uint64_t n = i.count > 2 ? s.value(s.operand(i, 2), lane) & 0xffffffff : 1;
    const uint64_t arrivals = bytes ? 1 : n;
    if (b.pending < arrivals) s.fail(i, "more arrivals than an mbarrier expects in a phase", lane);
    if (bytes) b.bytes += n;
    b.pending -= arrivals;
    update(s.launch, at, b);
  });
}
void expect_bytes(Step& s, const Instruction& i) {
  for_lanes(s.mask, [&](int lane) {
    std::byte* const at = barrier_of(s, i, 0, lane);
    Mbarrier b = read_barrier(at);
    b.bytes += s.value(s.operand(i, 1), lane) & 0xffffffff;
    update(s.launch, at, b);
  });
}
// mbarrier.{try,test}_wait.parity p, [barrier], parity.
void test_barrier(Step& s, const Instruction& i) {
  uint32_t done = 0;
  for_lanes(s.mask, [&](int lane) {
    const Mbarrier b = read_barrier(barrier_of(s, i, 1, lane));
    const auto parity = s.value(s.operand(i, 2), lane) & 1;
    done |= static_cast<uint32_t>(b.phase != parity) << lane;
  });
  s.set_predicate(s.operand(i, 0), done);
  if (done != s.mask) s.yield = true;
}

std::vector<uint32_t*> registers_out(Step& s, const Operand& vector) {
  std::vector<uint32_t*> to;
  for (int k = 0; k < vector.count; ++k) to.push_back(s.words_out(s.part(vector, k)));
  return to;
}
std::vector<const uint32_t*> registers_in(Step& s, const Operand& vector) {
  std::vector<const uint32_t*> from;
  for (int k = 0; k < vector.count; ++k) from.push_back(s.words(s.part(vector, k)));
  return from;
}

template <bool kLoad>
void matrices(Step& s, const Instruction& i) {
  if (!s.all_here(~0u)) return;
  const bool transposed = has_part(i.name, "trans");
  uint32_t addresses[32];
  for (int lane = 0; lane < 32; ++lane)
    addresses[lane] = static_cast<uint32_t>(s.address(s.operand(i, kLoad ? 1 : 0), lane));
  for (int lane = 0; lane < 8 * i.lanes; ++lane) {
    if (addresses[lane] % 16 != 0) s.fail(i, "a row that is not aligned to 16 bytes", lane);
    s.memory(i, Space::kShared, addresses[lane], 16, lane);
  }
  const SharedBytes shared = s.block().shared_view();
  if constexpr (kLoad)
    load_matrices(i.lanes, transposed, addresses, registers_out(s, s.operand(i, 0)).data(), shared);
  else {
    ++s.launch.progress;
    store_matrices(i.lanes, transposed, addresses, registers_in(s, s.operand(i, 1)).data(), shared);
  }
}

Element element_of(std::string_view name) {
  if (name == "f16") return Element::kF16;
  if (name == "e4m3") return Element::kE4m3;
  if (name == "e5m2") return Element::kE5m2;
  return Element::kBf16;
}

void mma(Step& s, const Instruction& i) {
  if (!s.all_here(~0u)) return;
  mma_m16n8k16(element_of(part_of(i.name, 6)), registers_out(s, s.operand(i, 0)).data(),
               registers_in(s, s.operand(i, 1)).data(), registers_in(s, s.operand(i, 2)).data(),
               registers_in(s, s.operand(i, 3)).data());
}

// wgmma.mma_async.sync.aligned.m64nNkK.f32.A.B {sums}, {a} or a, b, scale-d, scale-a, scale-b{,
// trans-a}{, trans-b}. It runs when it is waited for, or at once, as the launch draws it.
void wgmma_async(Step& s, const Instruction& i) {
  if (!s.all_here(~0u)) return;
  Wgmma op;
  const std::string_view shape = part_of(i.name, 4);
  op.n = std::stoi(std::string(shape.substr(shape.find('n') + 1)));
  op.a = element_of(part_of(i.name, 6));
  op.b = element_of(part_of(i.name, 7));
  const Operand& a = s.operand(i, 1);
  op.a_in_registers = a.kind == Operand::kVector;
  op.keeps_sums = (s.predicate(s.operand(i, 3)) & 1) != 0;
  op.negated_a = static_cast<int32_t>(s.value(s.operand(i, 4), 0)) < 0;
  op.negated_b = static_cast<int32_t>(s.value(s.operand(i, 5), 0)) < 0;
  int k = 6;
  if (!op.a_in_registers && i.count > k + 1) op.transposed_a = s.value(s.operand(i, k++), 0) != 0;
  if (i.count > k) op.transposed_b = s.value(s.operand(i, k), 0) != 0;
  std::vector<uint32_t> held;
  uint64_t a_descriptor = 0;
  if (op.a_in_registers)
    for (const uint32_t* r : registers_in(s, a)) held.insert(held.end(), r, r + 32);
  else a_descriptor = s.value(a, 0);
  const uint64_t b_descriptor = s.value(s.operand(i, 2), 0);
  std::vector<uint32_t*> sums = registers_out(s, s.operand(i, 0));
  const SharedBytes shared = s.block().shared_view();
  const int warp = s.warp.index & 3;
  s.warp.products.queue.push_back(
      {s.warp.products.committed, ~0u, [=, held = std::move(held)]() mutable {
         const uint32_t* of[4];
         for (int r = 0; r < 4 && op.a_in_registers; ++r) of[r] = held.data() + 32 * r;
         wgmma(op, warp, sums.data(), of, a_descriptor, b_descriptor, shared);
       }});
}
void commit_products(Step& s, const Instruction&) {
  ++s.warp.products.committed;
  if (s.launch.random() & 1) s.warp.products.drain(0);
}
void wait_for_products(Step& s, const Instruction& i) {
  s.warp.products.drain(static_cast<int>(s.value(s.operand(i, 0), 0)));
}

}  // namespace

void barrier_complete(Launch& launch, std::byte* barrier, int64_t bytes) {
  Mbarrier b = read_barrier(barrier);
  b.bytes -= static_cast<uint64_t>(bytes);
  ++launch.progress;
  update(launch, barrier, b);
}
void barrier_arrive(Launch& launch, std::byte* barrier, uint32_t count) {
  Mbarrier b = read_barrier(barrier);
  if (b.pending < count) throw Fault("more arrivals of copies than an mbarrier expects in a phase");
  b.pending -= count;
  update(launch, barrier, b);
}

Handler find_together(Instruction& i, const Function&) {
  const std::string_view base = part_of(i.name, 0), second = part_of(i.name, 1);
  if (base == "shfl") return shuffle;
  if (base == "vote") return vote;
  if (base == "redux" && i.type != Type::kF32) return reduce;
  if (base == "match" && second == "any") return match_any;
  if (base == "elect") return elect;
  if (base == "activemask")
    return [](Step& s, const Instruction& at) {
      for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(at, 0), lane, s.mask); });
    };
  if (base == "bar" && second == "warp") return meet_in_warp;
  if (base == "barrier" && second == "cluster") return cluster_barrier;
  if (base == "bar" || base == "barrier") return named_barrier;
  if (base == "mbarrier") {
    if (second == "init") return init_barrier;
    if (second == "arrive") return arrive;
    if (second == "expect_tx") return expect_bytes;
    if (second == "try_wait" || second == "test_wait")
      return has_part(i.name, "parity") ? test_barrier : nullptr;
    if (second == "inval") return [](Step&, const Instruction&) {};
    return nullptr;
  }
  if (base == "ldmatrix") return matrices<true>;
  if (base == "stmatrix") return matrices<false>;
  if (base == "mma") return mma;
  if (base == "wgmma") {
    if (second == "mma_async") return wgmma_async;
    if (second == "commit_group") return commit_products;
    if (second == "wait_group") return wait_for_products;
  }
  return nullptr;
}

}  // namespace winnow::emulated
