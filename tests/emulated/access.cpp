// Loads, stores and atomic operations, each address checked; asynchronous copies.
#include <algorithm>
#include <bit>
#include <cstring>

#include "emulated/memory.h"
#include "emulated/tensor_map.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

uint64_t load_bits(const std::byte* from, Type type) {
  uint64_t bits = 0;
  std::memcpy(&bits, from, bytes_of(type));
  // A register may be wider than what is loaded.
  const auto extended = [](auto x) { return static_cast<uint64_t>(static_cast<int64_t>(x)); };
  if (type == Type::kS8) return extended(static_cast<int8_t>(bits));
  if (type == Type::kS16) return extended(static_cast<int16_t>(bits));
  if (type == Type::kS32) return extended(static_cast<int32_t>(bits));
  return bits;
}

// The lanes' memory of operand `k`, checked for `lanes` values of the type.
template <class F>
void for_memory(Step& s, const Instruction& i, int k, F&& f) {
  const Operand& at = s.operand(i, k);
  const size_t bytes = static_cast<size_t>(bytes_of(i.type)) * i.lanes;
  const Space space =
      at.kind == Operand::kAddress && at.base == Operand::kSymbol ? at.space : i.space;
  for_lanes(s.mask, [&](int lane) {
    const uint64_t address = s.address(at, lane);
    if (address % bytes != 0 && space != Space::kLane && space != Space::kParam)
      s.fail(i, "an address that is no multiple of " + std::to_string(bytes), lane);
    f(lane, s.memory(i, space, address, bytes, lane));
  });
}

void load(Step& s, const Instruction& i) {
  const Operand& to = s.operand(i, 0);
  const int bytes = bytes_of(i.type);
  for_memory(s, i, 1, [&](int lane, const std::byte* from) {
    if (to.kind != Operand::kVector) return s.set_value(to, lane, load_bits(from, i.type));
    for (int k = 0; k < to.count; ++k)
      s.set_value(s.part(to, k), lane, load_bits(from + k * bytes, i.type));
  });
}

void store(Step& s, const Instruction& i) {
  const Operand& from = s.operand(i, 1);
  const int bytes = bytes_of(i.type);
  ++s.launch.progress;
  for_memory(s, i, 0, [&](int lane, std::byte* to) {
    const auto put = [&](const Operand& o, std::byte* at) {
      const uint64_t bits = s.value(o, lane);
      std::memcpy(at, &bits, bytes);
    };
    if (from.kind != Operand::kVector) return put(from, to);
    for (int k = 0; k < from.count; ++k) put(s.part(from, k), to + k * bytes);
  });
}

template <class T>
T changed(std::string_view how, T old, T a, T b) {
  if (how == "add") return old + a;
  if (how == "exch") return a;
  if (how == "cas") return old == a ? b : old;
  if (how == "min") return std::min(old, a);
  if (how == "max") return std::max(old, a);
  if constexpr (std::is_integral_v<T>) {
    if (how == "and") return old & a;
    if (how == "or") return old | a;
    if (how == "xor") return old ^ a;
    if (how == "inc") return old >= a ? T{0} : static_cast<T>(old + 1);
  }
  return old;
}
constexpr std::string_view kAtomics[] = {"add", "exch", "cas", "min", "max",
                                         "and", "or",   "xor", "inc"};

// atom has a result, red has none.
template <class T>
void atomic(Step& s, const Instruction& i) {
  const bool has_result = part_of(i.name, 0) == "atom";
  const int first = has_result ? 1 : 0;
  const std::string_view how = kAtomics[i.extra];
  ++s.launch.progress;
  for_memory(s, i, first, [&](int lane, std::byte* at) {
    const auto value = [&](int k) {
      const uint64_t bits = s.value(s.operand(i, k), lane);
      T x;
      std::memcpy(&x, &bits, sizeof x);
      return x;
    };
    T old;
    std::memcpy(&old, at, sizeof old);
    const T b = i.count > first + 2 ? value(first + 2) : T{};
    const T x = changed<T>(how, old, value(first + 1), b);
    std::memcpy(at, &x, sizeof x);
    if (has_result) {
      uint64_t bits = 0;
      std::memcpy(&bits, &old, sizeof old);
      s.set_value(s.operand(i, 0), lane, bits);
    }
  });
}

// cp.async [to], [from], bytes{, of which so many are read}.
void copy_async(Step& s, const Instruction& i) {
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> unused;
  for_lanes(s.mask, [&](int lane) {
    const uint64_t size = s.value(s.operand(i, 2), lane);
    uint64_t read = size;
    if (i.count > 3 && s.operand(i, 3).kind != Operand::kNone &&
        !has_part(i.name, "L2::cache_hint"))
      read = std::min(size, s.value(s.operand(i, 3), lane));
    const uint64_t to = s.address(s.operand(i, 0), lane);
    const uint64_t from = s.address(s.operand(i, 1), lane);
    if (to % size != 0 || from % size != 0)
      s.fail(i, "an address that is no multiple of the size", lane);
    std::byte* const target = s.memory(i, Space::kShared, to, size, lane);
    const std::byte* const source = read ? s.memory(i, Space::kGlobal, from, read, lane) : nullptr;
    s.warp.copies.queue.push_back({s.warp.copies.committed, 1u << lane, [=] {
                                     if (read) std::memcpy(target, source, read);
                                     std::memset(target + read, 0, size - read);
                                   }});
  });
}

// The mbarrier that an operand names.
std::byte* barrier_at(Step& s, const Instruction& i, int k, int lane) {
  return s.memory(i, Space::kShared, s.address(s.operand(i, k), lane), 8, lane);
}

// cp.async.bulk: global to shared, shared to a block's shared memory, shared to global.
void copy_bulk(Step& s, const Instruction& i) {
  const bool to_global = part_of(i.name, 3) == "global";
  const bool from_shared = part_of(i.name, 4) == "shared::cta";
  for_lanes(s.mask, [&](int lane) {
    const uint64_t bytes = static_cast<uint32_t>(s.value(s.operand(i, 2), lane));
    const uint64_t to = s.address(s.operand(i, 0), lane), from = s.address(s.operand(i, 1), lane);
    if (bytes % 16 != 0 || to % 16 != 0 || from % 16 != 0)
      s.fail(i, "a bulk copy that is not aligned to 16 bytes", lane);
    if (bytes == 0) return;
    std::byte* const target =
        s.memory(i, to_global ? Space::kGlobal : Space::kShared, to, bytes, lane);
    const std::byte* const source =
        s.memory(i, from_shared ? Space::kShared : Space::kGlobal, from, bytes, lane);
    Launch* const launch = &s.launch;
    if (to_global) {
      s.warp.stores.queue.push_back({s.warp.stores.committed, 1u << lane, [=] {
                                       std::memcpy(target, source, bytes);
                                       ++launch->progress;
                                     }});
    } else {
      std::byte* const barrier = barrier_at(s, i, 3, lane);
      s.launch.later(&s.block(), [=] {
        std::memcpy(target, source, bytes);
        barrier_complete(*launch, barrier, static_cast<int64_t>(bytes));
      });
    }
  });
}

// cp.async.bulk.tensor: a box of a tensor, swizzled; with .multicast::cluster to several blocks.
void copy_tensor(Step& s, const Instruction& i) {
  const bool multicast = has_part(i.name, "multicast::cluster");
  for_lanes(s.mask, [&](int lane) {
    const Operand& source = s.operand(i, 1);
    TensorMap map;
    std::memcpy(&map,
                s.memory(i, Space::kGeneric, s.address(s.part(source, 0), lane), sizeof map, lane),
                sizeof map);
    if (map.magic != TensorMap::kMagic) s.fail(i, "no tensor map", lane);
    int64_t at[5] = {};
    for (int d = 0; d + 1 < source.count; ++d)
      at[d] = static_cast<int32_t>(s.value(s.part(source, d + 1), lane));
    uint64_t bytes = map.element_bytes;
    for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
    const uint64_t to = s.address(s.operand(i, 0), lane);
    const uint64_t barrier = s.address(s.operand(i, 2), lane);
    const uint32_t blocks = multicast ? static_cast<uint32_t>(s.value(s.operand(i, 3), lane)) : 0;
    Launch* const launch = &s.launch;
    Block* const block = &s.block();
    const auto fill = [=](Block& target) {
      std::byte* const memory = shared_memory(target, to & ((1u << kRankShift) - 1), bytes);
      std::byte* const done = shared_memory(target, barrier & ((1u << kRankShift) - 1), 8);
      const uint64_t count = bytes / map.element_bytes;
      for (uint64_t e = 0; e < count; ++e) {
        uint64_t rest = e, address = map.base;
        bool inside = true;
        for (int d = 0; d < map.rank; ++d) {
          const int64_t c = at[d] + static_cast<int64_t>(rest % map.box[d]);
          rest /= map.box[d];
          inside &= c >= 0 && c < map.shape[d];
          address += static_cast<uint64_t>(c) * map.stride[d];
        }
        uint64_t place = (to & ((1u << kRankShift) - 1)) + e * map.element_bytes;
        const uint64_t mask = map.swizzle == 128  ? 7
                              : map.swizzle == 64 ? 3
                              : map.swizzle == 32 ? 1
                                                  : 0;
        place ^= (place >> 7 & mask) << 4;
        std::byte* const here = memory + (place - (to & ((1u << kRankShift) - 1)));
        if (inside) std::memcpy(here, reinterpret_cast<const void*>(address), map.element_bytes);
        else std::memset(here, 0, map.element_bytes);
      }
      barrier_complete(*launch, done, static_cast<int64_t>(bytes));
    };
    if (!shared_memory(*block, to, bytes)) s.fail(i, "a box outside of shared memory", lane);
    s.launch.later(block, [=] {
      if (!multicast) return fill(*block);
      for (size_t rank = 0; rank < block->in->blocks.size(); ++rank)
        if (blocks >> rank & 1) fill(*block->in->blocks[rank]);
    });
  });
}

// st.async: the bytes arrive some time later, and count on a barrier of the block they go to.
void store_async(Step& s, const Instruction& i) {
  const Operand& from = s.operand(i, 1);
  const int bytes = bytes_of(i.type);
  for_lanes(s.mask, [&](int lane) {
    const size_t size = static_cast<size_t>(bytes) * i.lanes;
    std::byte* const to = s.memory(i, Space::kShared, s.address(s.operand(i, 0), lane), size, lane);
    std::byte* const barrier = barrier_at(s, i, 2, lane);
    uint32_t words[4] = {};
    for (int k = 0; k < i.lanes; ++k) {
      const uint64_t bits = s.value(from.kind == Operand::kVector ? s.part(from, k) : from, lane);
      std::memcpy(reinterpret_cast<std::byte*>(words) + k * bytes, &bits, bytes);
    }
    Launch* const launch = &s.launch;
    s.launch.later(&s.block(), [=] {
      std::memcpy(to, words, size);
      barrier_complete(*launch, barrier, static_cast<int64_t>(size));
    });
  });
}

void wait_for_groups(Step& s, const Instruction& i) {
  DeferredQueue& queue = has_part(i.name, "bulk") ? s.warp.stores : s.warp.copies;
  queue.drain(static_cast<int>(s.value(s.operand(i, 0), 0)));
}

}  // namespace

void DeferredQueue::drain(int left, bool all) {
  while (!queue.empty() && (all || queue.front().group < committed - left)) {
    queue.front().run();
    queue.pop_front();
  }
}

Handler find_access(Instruction& i, const Function&) {
  const std::string_view base = part_of(i.name, 0);
  if (base == "ld" || base == "ldu") return load;
  if (base == "st") {
    if (part_of(i.name, 1) == "async") return store_async;
    return store;
  }
  if (base == "atom" || base == "red") {
    for (i.extra = 0; i.extra < static_cast<int32_t>(std::size(kAtomics)); ++i.extra) {
      if (!has_part(i.name, kAtomics[i.extra])) continue;
      switch (i.type) {
        case Type::kU32:
        case Type::kB32: return atomic<uint32_t>;
        case Type::kS32: return atomic<int32_t>;
        case Type::kU64:
        case Type::kB64: return atomic<uint64_t>;
        case Type::kS64: return atomic<int64_t>;
        case Type::kF32: return atomic<float>;
        default: return nullptr;
      }
    }
    return nullptr;
  }
  if (base == "cp" && part_of(i.name, 1) == "async") {
    const std::string_view what = part_of(i.name, 2);
    if (what == "commit_group")
      return [](Step& s, const Instruction&) { ++s.warp.copies.committed; };
    if (what == "wait_group") return wait_for_groups;
    if (what == "wait_all")
      return [](Step& s, const Instruction&) { s.warp.copies.drain(0, true); };
    if (what == "mbarrier")
      return [](Step& s, const Instruction& at) {
        // One arrival of each lane, when its copies have landed.
        std::vector<std::byte*> barriers;
        for_lanes(s.mask, [&](int lane) { barriers.push_back(barrier_at(s, at, 0, lane)); });
        Warp* const warp = &s.warp;
        Launch* const launch = &s.launch;
        std::vector<Deferred> mine;
        std::deque<Deferred> others;
        for (Deferred& d : warp->copies.queue)
          (d.lanes & s.mask ? mine.push_back(std::move(d)) : others.push_back(std::move(d)));
        warp->copies.queue = std::move(others);
        s.launch.later(&s.block(), [=] {
          for (const Deferred& d : mine) d.run();
          for (std::byte* b : barriers) barrier_arrive(*launch, b, 1);
        });
      };
    if (what == "bulk") {
      const std::string_view which = part_of(i.name, 3);
      if (which == "commit_group")
        return [](Step& s, const Instruction&) { ++s.warp.stores.committed; };
      if (which == "wait_group") return wait_for_groups;
      if (which == "tensor") return copy_tensor;
      if (which == "shared::cluster" || which == "global") return copy_bulk;
      return nullptr;
    }
    if (what == "ca" || what == "cg") return copy_async;
  }
  return nullptr;
}

}  // namespace winnow::emulated
