// Branches, calls, addresses, and instructions that only matter for speed.
#include "emulated/memory.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

// Sends `lanes` of the group to another place; the others stay. The group that runs is the last.
void send(Step& s, uint32_t lanes, int32_t to) {
  Group& group = s.warp.groups[s.warp.turn];
  s.jumped = true;
  if (lanes == group.mask) {
    group.pc = to;
    return;
  }
  group.mask &= ~lanes;
  group.pc = s.pc + 1;
  s.warp.groups.push_back({s.frame, lanes, to, false});
}

// The guard has chosen the lanes already.
void branch(Step& s, const Instruction& i) { send(s, s.mask, s.operand(i, 0).at); }

void call(Step& s, const Instruction& i) {
  // (results), name, (arguments), or without results.
  int k = 0;
  const bool has_results = s.operand(i, 0).kind == Operand::kVector;
  if (has_results) ++k;
  const Operand& name = s.operand(i, k);
  const Function& callee = s.launch.program.function(reinterpret_cast<const char*>(name.offset));
  auto frame = std::make_unique<Frame>();
  frame->function = &callee;
  frame->caller = s.frame;
  frame->return_to = s.pc + 1;
  frame->call = &i;
  frame->depth = s.frame->depth + 1;
  frame->lanes = s.mask;
  frame->registers.resize(static_cast<size_t>(callee.slots) * 32 + 64);
  frame->predicates.resize(callee.predicates + 1);
  frame->memory.resize(callee.lane_bytes * 32 + 16);
  if (i.count > k + 1) {
    const Operand& arguments = s.operand(i, k + 1);
    if (arguments.count != callee.parameters.size()) s.fail(i, "a call with other arguments");
    for_lanes(s.mask, [&](int lane) {
      for (int a = 0; a < arguments.count; ++a) {
        const Variable& to = callee.parameters[a];
        std::memcpy(frame->lane_memory(lane) + to.offset,
                    s.frame->lane_memory(lane) + s.part(arguments, a).offset, to.bytes);
      }
    });
  }
  Frame* const inner = frame.get();
  s.warp.frames.push_back(std::move(frame));
  const uint32_t lanes = s.mask;
  send(s, lanes, s.pc);
  for (Group& group : s.warp.groups)
    if (group.frame == s.frame && group.mask == lanes && group.pc == s.pc) {
      group.frame = inner;
      group.pc = 0;
    }
}

void end_lanes(Step& s, uint32_t lanes) {
  Warp& warp = s.warp;
  Block& block = s.block();
  warp.live &= ~lanes;
  const auto count = static_cast<uint32_t>(std::popcount(lanes));
  block.exited += count;
  block.in->exited += count;
  ++s.launch.progress;
  Group& group = warp.groups[warp.turn];
  s.jumped = true;
  group.mask &= ~lanes;
  group.pc = s.pc + 1;
  if (group.mask == 0) warp.groups.erase(warp.groups.begin() + static_cast<long>(warp.turn));
  for (Group& g : warp.groups) g.parked = false;  // the lanes they wait for may have been these
}

void give_back(Step& s, const Instruction& i) {
  if (!s.frame->caller) return end_lanes(s, s.mask);
  Frame* const frame = s.frame;
  Frame* const caller = frame->caller;
  const Operand& results = caller->function->operands[frame->call->first];
  if (results.kind == Operand::kVector && !frame->function->results.empty())
    for_lanes(s.mask, [&](int lane) {
      const Variable& from = frame->function->results[0];
      const Operand& to = caller->function->operands[results.at];
      std::memcpy(caller->lane_memory(lane) + to.offset, frame->lane_memory(lane) + from.offset,
                  from.bytes);
    });
  (void)i;
  frame->lanes &= ~s.mask;
  Group& group = s.warp.groups[s.warp.turn];
  s.jumped = true;
  const uint32_t lanes = s.mask;
  group.mask &= ~lanes;
  group.pc = s.pc + 1;
  if (group.mask == 0) group = {caller, lanes, frame->return_to, false};
  else s.warp.groups.push_back({caller, lanes, frame->return_to, false});
  if (frame->lanes == 0)
    std::erase_if(s.warp.frames, [&](const auto& f) { return f.get() == frame; });
}

// cvta: between a space's addresses and generic ones, which are the host's.
void to_generic(Step& s, const Instruction& i) {
  const Operand& from = s.operand(i, 1);
  const bool back = part_of(i.name, 1) == "to";
  for_lanes(s.mask, [&](int lane) {
    uint64_t address = s.address(from, lane);
    if (i.space == Space::kShared && from.kind != Operand::kSymbol) {
      Block& block = s.block();
      if (back) {
        const uint64_t offset = address - reinterpret_cast<uint64_t>(block.shared);
        address = offset < block.shared_bytes ? offset : address;
      } else {
        std::byte* const memory = shared_memory(block, address, 1);
        address = memory ? reinterpret_cast<uint64_t>(memory) : address;
      }
    } else if (i.space == Space::kShared && !back) {
      address = reinterpret_cast<uint64_t>(s.block().shared) + address;
    }
    s.set_value(s.operand(i, 0), lane, address);
  });
}

void map_to_peer(Step& s, const Instruction& i) {
  for_lanes(s.mask, [&](int lane) {
    const uint64_t address = s.value(s.operand(i, 1), lane) & ((1u << kRankShift) - 1);
    const auto rank = static_cast<uint32_t>(s.value(s.operand(i, 2), lane));
    // A block that does not exist: an address that nothing may touch.
    s.set_value(s.operand(i, 0), lane, address | uint64_t{(rank & 63) + 1} << kRankShift);
  });
}

void nothing(Step&, const Instruction&) {}

}  // namespace

Handler find_control(Instruction& i, const Function&) {
  const std::string_view base = part_of(i.name, 0);
  if (base == "bra") return branch;
  if (base == "call") return call;
  if (base == "ret") return give_back;
  if (base == "exit") return [](Step& s, const Instruction&) { end_lanes(s, s.mask); };
  if (base == "trap") return [](Step& s, const Instruction& at) { s.fail(at, "trap"); };
  if (base == "cvta") return to_generic;
  if (base == "mapa") return map_to_peer;
  for (const char* idle : {"fence", "membar", "prefetch", "prefetchu", "setmaxnreg",
                           "griddepcontrol", "nanosleep", "discard"})
    if (base == idle) return nothing;
  if (base == "wgmma" && part_of(i.name, 1) == "fence") return nothing;
  if (base == "createpolicy")
    return [](Step& s, const Instruction& at) {
      for_lanes(s.mask, [&](int lane) { s.set_value(s.operand(at, 0), lane, 0); });
    };
  return nullptr;
}

const uint32_t* Step::special(int which) const {
  if (which == kClock || which == kClock64 || which == kGlobaltimer)
    for (uint32_t& x : warp.special[which]) x = static_cast<uint32_t>(launch.clock * 16);
  return warp.special[which];
}

uint32_t Step::predicate(const Operand& o) const {
  uint32_t bits = 0;
  if (o.kind == Operand::kPredicate) bits = frame->predicates[o.at];
  else if (o.kind == Operand::kConstant) bits = frame->function->constants[o.at] ? ~0u : 0;
  return o.negated ? ~bits : bits;
}

uint64_t Step::address(const Operand& o, int lane) {
  const auto place = [&](Space space, int64_t offset) -> uint64_t {
    switch (space) {
      case Space::kParam: return reinterpret_cast<uint64_t>(launch.parameters.data()) + offset;
      case Space::kLane: return reinterpret_cast<uint64_t>(frame->lane_memory(lane)) + offset;
      default: return static_cast<uint64_t>(offset);
    }
  };
  switch (o.kind) {
    case Operand::kSymbol:
      if (o.space == Space::kShared && o.offset < 0) return static_cast<uint64_t>(block().dynamic);
      return place(o.space, o.offset);
    case Operand::kAddress:
      if (o.base == Operand::kSymbol) {
        if (o.space == Space::kShared && o.count == 1)
          return static_cast<uint64_t>(block().dynamic + o.offset);
        return place(o.space, o.offset);
      }
      if (o.base == Operand::kConstant) return static_cast<uint64_t>(o.offset);
      if (!o.wide)
        return static_cast<uint32_t>(frame->registers[o.at + lane] +
                                     static_cast<uint32_t>(o.offset));
      return reinterpret_cast<const uint64_t*>(frame->registers.data() + o.at)[lane] +
             static_cast<uint64_t>(o.offset);
    default: return value(o, lane);
  }
}

std::byte* shared_memory(Block& block, uint64_t address, size_t bytes) {
  Block* target = &block;
  if (const uint64_t rank = address >> kRankShift; rank > 0) {
    if (rank > block.in->blocks.size()) return nullptr;
    target = block.in->blocks[rank - 1].get();
    address &= (1u << kRankShift) - 1;
  }
  if (address < kSystemShared || address + bytes > target->shared_bytes) return nullptr;
  return target->shared + address;
}

std::byte* Step::memory(const Instruction& i, Space space, uint64_t at, size_t bytes, int lane) {
  std::byte* const host = reinterpret_cast<std::byte*>(at);
  const auto within = [&](const std::byte* begin, size_t size) {
    return host >= begin && bytes <= size && host <= begin + (size - bytes);
  };
  if (space == Space::kShared) {
    std::byte* const found = shared_memory(block(), at, bytes);
    if (!found)
      fail(i,
           "shared memory at " + std::to_string(at) + ", " + std::to_string(bytes) + " bytes of " +
               std::to_string(block().shared_bytes),
           lane, true);
    return found;
  }
  if (space == Space::kGeneric || space == Space::kGlobal) {
    if (holds(at, bytes)) return host;
    if (space == Space::kGeneric)
      for (const auto& peer : block().in->blocks)
        if (within(peer->shared + kSystemShared, peer->shared_bytes - kSystemShared)) return host;
  }
  if (space != Space::kGlobal) {
    if (within(launch.parameters.data(), launch.parameters.size())) return host;
    for (Frame* f = frame; f; f = f->caller)
      if (within(f->memory.data(), f->memory.size())) return host;
  }
  char text[64];
  std::snprintf(text, sizeof text, "memory that is not the kernel's: %zu bytes at 0x%llx", bytes,
                static_cast<unsigned long long>(at));
  fail(i, text, lane, true);
}

void Step::fail(const Instruction& i, const std::string& why, int lane, bool outside) {
  const Function& f = *frame->function;
  std::string message = f.name + ": " + std::string(i.name) + ": " + why;
  const Place& place = f.places[i.where];
  const auto file = [&](uint32_t n) {
    const auto found = launch.program.files.find(n);
    return found == launch.program.files.end() ? std::to_string(n) : found->second;
  };
  message += "; at " + file(place.file) + ":" + std::to_string(place.line);
  if (place.inlined_line)
    message += " inlined at " + file(place.inlined_file) + ":" + std::to_string(place.inlined_line);
  const Block& b = *warp.block;
  message += "; block (" + std::to_string(b.at[0]) + ", " + std::to_string(b.at[1]) + ", " +
             std::to_string(b.at[2]) + ")";
  if (lane < 0 && mask) lane = std::countr_zero(mask);
  message += ", thread " + std::to_string(warp.index * 32 + std::max(lane, 0));
  if (outside) throw MemoryFault(message);
  throw Fault(message);
}

}  // namespace winnow::emulated
