// Runs the blocks of a launch: warps in a drawn order, each for a drawn number of instructions, so
// that another seed gives another order of events.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "emulated/memory.h"
#include "emulated/warp.h"

namespace winnow::emulated {
namespace {

constexpr int kMostTurn = 300;         // instructions of a warp's turn
constexpr uint64_t kMostDelay = 40;    // rounds until an asynchronous operation is done
constexpr uint64_t kMostIdle = 20000;  // rounds without an event: a deadlock

uint64_t next_seed() {
  static const char* const given = std::getenv("WINNOW_EMULATED_SEED");
  static uint64_t launches = 0;
  return (given ? std::strtoull(given, nullptr, 10) : 1) * 1000003 + launches++;
}

Dim split(uint64_t number, const Dim& of) {
  return {static_cast<uint32_t>(number % of.x), static_cast<uint32_t>(number / of.x % of.y),
          static_cast<uint32_t>(number / of.x / of.y)};
}

void set_all(uint32_t (&lanes)[32], uint32_t value) { std::fill_n(lanes, 32, value); }

std::unique_ptr<Warp> make_warp(Launch& launch, Block& block, int index) {
  auto warp = std::make_unique<Warp>();
  const LaunchConfig& c = launch.config;
  warp->block = &block;
  warp->index = index;
  const uint64_t threads = c.block.count();
  for (int lane = 0; lane < 32; ++lane) {
    const uint64_t thread = static_cast<uint64_t>(index) * 32 + static_cast<uint64_t>(lane);
    if (thread < threads) warp->live |= 1u << lane;
    const Dim at = split(thread, c.block);
    warp->special[kTidX][lane] = at.x;
    warp->special[kTidY][lane] = at.y;
    warp->special[kTidZ][lane] = at.z;
    warp->special[kLaneid][lane] = static_cast<uint32_t>(lane);
    const uint32_t bit = 1u << lane;
    warp->special[kLanemaskEq][lane] = bit;
    warp->special[kLanemaskLt][lane] = bit - 1;
    warp->special[kLanemaskLe][lane] = bit | (bit - 1);
    warp->special[kLanemaskGe][lane] = ~(bit - 1);
    warp->special[kLanemaskGt][lane] = ~(bit | (bit - 1));
  }
  const Dim clusters = {c.grid.x / c.cluster.x, c.grid.y / c.cluster.y, c.grid.z / c.cluster.z};
  const std::pair<int, uint32_t> uniform[] = {
      {kNtidX, c.block.x},
      {kNtidY, c.block.y},
      {kNtidZ, c.block.z},
      {kCtaidX, block.at[0]},
      {kCtaidY, block.at[1]},
      {kCtaidZ, block.at[2]},
      {kNctaidX, c.grid.x},
      {kNctaidY, c.grid.y},
      {kNctaidZ, c.grid.z},
      {kWarpid, static_cast<uint32_t>(index)},
      {kSmid, static_cast<uint32_t>(block.number % kMultiprocessors)},
      {kClusterRank, static_cast<uint32_t>(block.rank)},
      {kClusterSizeX, c.cluster.x},
      {kClusterSizeY, c.cluster.y},
      {kClusterSizeZ, c.cluster.z},
      {kClusteridX, block.at[0] / c.cluster.x},
      {kClusteridY, block.at[1] / c.cluster.y},
      {kClusteridZ, block.at[2] / c.cluster.z},
      {kNclusteridX, clusters.x},
      {kDynamicSharedSize, static_cast<uint32_t>(c.dynamic_shared)}};
  for (const auto& [which, value] : uniform) set_all(warp->special[which], value);

  auto frame = std::make_unique<Frame>();
  frame->function = &launch.kernel;
  frame->lanes = warp->live;
  frame->registers.resize(static_cast<size_t>(launch.kernel.slots) * 32 + 64, 0xdeadbeefu);
  frame->predicates.resize(static_cast<size_t>(launch.kernel.predicates) + 1);
  frame->memory.resize(launch.kernel.lane_bytes * 32 + 16, std::byte{0xff});
  warp->groups.push_back({frame.get(), warp->live, 0, false});
  warp->frames.push_back(std::move(frame));
  return warp;
}

std::unique_ptr<Block> make_block(Launch& launch, Cluster& cluster, const Dim& at, int rank) {
  auto block = std::make_unique<Block>();
  const Function& kernel = launch.kernel;
  block->launch = &launch;
  block->in = &cluster;
  block->rank = rank;
  block->at[0] = at.x;
  block->at[1] = at.y;
  block->at[2] = at.z;
  const Dim& grid = launch.config.grid;
  block->number = at.x + uint64_t{grid.x} * (at.y + uint64_t{grid.y} * at.z);
  const size_t align = 1024;
  block->dynamic = static_cast<int64_t>((kernel.shared_bytes + 127) / 128 * 128);
  if (launch.config.dynamic_shared > 0)
    block->dynamic = static_cast<int64_t>((kernel.shared_bytes + align - 1) / align * align);
  block->shared_bytes = static_cast<size_t>(block->dynamic) + launch.config.dynamic_shared;
  // NaN where nothing has been written.
  block->memory.assign(block->shared_bytes + align, std::byte{0xff});
  const auto address = reinterpret_cast<uintptr_t>(block->memory.data());
  block->shared = block->memory.data() + (align - address % align) % align;
  block->threads = static_cast<uint32_t>(launch.config.block.count());
  for (uint32_t w = 0; w < (block->threads + 31) / 32; ++w)
    block->warps.push_back(make_warp(launch, *block, static_cast<int>(w)));
  return block;
}

// The group of a warp that runs next: the deepest call, then the first instruction, so that lanes
// that have parted meet again; another one where that one waits. -1: all wait for each other.
int choose_group(const Warp& warp) {
  int best = -1;
  const int count = static_cast<int>(warp.groups.size());
  for (int k = 0; k < count; ++k) {
    const int g = (static_cast<int>(warp.turn) + 1 + k) % count;
    const Group& group = warp.groups[g];
    if (group.parked) continue;
    if (warp.yielded) return g;  // the next one
    if (best < 0) {
      best = g;
      continue;
    }
    const Group& other = warp.groups[best];
    const bool deeper = group.frame->depth > other.frame->depth;
    if (deeper || (group.frame->depth == other.frame->depth && group.pc < other.pc)) best = g;
  }
  return best;
}

// Joins the group with others at its place.
void join(Warp& warp) {
  for (size_t k = warp.groups.size(); k-- > 0;) {
    Group& here = warp.groups[warp.turn];
    if (k == warp.turn || warp.groups[k].frame != here.frame || warp.groups[k].pc != here.pc)
      continue;
    here.mask |= warp.groups[k].mask;
    here.parked = false;
    warp.groups.erase(warp.groups.begin() + static_cast<long>(k));
    if (k < warp.turn) --warp.turn;
  }
}

}  // namespace

void Launch::later(Block* block, std::function<void()> run) {
  pending.push_back({clock + random() % kMostDelay, block, std::move(run)});
}

// Runs what is pending and chosen. It may queue more.
template <class F>
static void run_those(Launch& launch, F&& chosen) {
  for (size_t k = 0; k < launch.pending.size();) {
    if (!chosen(launch.pending[k])) {
      ++k;
      continue;
    }
    const auto run = std::move(launch.pending[k].run);
    launch.pending[k] = std::move(launch.pending.back());
    launch.pending.pop_back();
    run();
  }
}

void Launch::run_pending() {
  run_those(*this, [&](const Pending& p) { return p.due <= clock; });
}

void Launch::finish(Block* block) {
  for (const auto& warp : block->warps) {
    warp->copies.drain(0, true);
    warp->stores.drain(0, true);
    warp->products.drain(0, true);
  }
  run_those(*this, [&](const Pending& p) { return p.block == block; });
}

// A turn of a warp; false when it has ended.
bool Launch::turn(Warp& warp) {
  if (warp.groups.empty()) return false;
  const int chosen = choose_group(warp);
  if (chosen < 0) throw Fault(kernel.name + ": lanes of a warp wait for each other");
  warp.turn = static_cast<size_t>(chosen);
  warp.yielded = false;
  const auto budget = static_cast<int>(1 + random() % kMostTurn);
  for (int k = 0; k < budget; ++k) {
    Group& group = warp.groups[warp.turn];
    Frame* const frame = group.frame;
    if (group.pc >= static_cast<int32_t>(frame->function->code.size()))
      throw Fault(frame->function->name + ": ran behind its end");
    const Instruction& i = frame->function->code[static_cast<size_t>(group.pc)];
    uint32_t mask = group.mask;
    if (i.guard >= 0) {
      const uint32_t guard = frame->predicates[static_cast<size_t>(i.guard)];
      mask &= i.guard_negated ? ~guard : guard;
    }
    if (mask == 0) {
      ++group.pc;
    } else {
      Step step{*this, warp, frame, mask, group.pc};
      i.run(step, i);
      if (warp.groups.empty()) return false;
      if (step.retry) {
        warp.groups[warp.turn].parked = step.park;
        warp.yielded = true;
        return true;
      }
      if (warp.turn >= warp.groups.size()) return true;
      if (!step.jumped) ++warp.groups[warp.turn].pc;
      if (step.yield) {
        warp.yielded = true;
        if (warp.groups.size() > 1) join(warp);
        return true;
      }
      if (step.jumped && warp.groups.size() > 1) {
        join(warp);
        return true;
      }
    }
    if (warp.groups.size() > 1) {
      join(warp);
      const Group& here = warp.groups[warp.turn];
      for (const Group& other : warp.groups)
        if (!other.parked && (other.frame->depth > here.frame->depth ||
                              (other.frame == here.frame && other.pc < here.pc)))
          return true;
    }
  }
  return true;
}

void Launch::start_clusters() {
  const uint64_t cluster_blocks = config.cluster.count();
  const size_t shared = config.dynamic_shared + kernel.shared_bytes;
  const uint64_t of_multiprocessor = std::max<uint64_t>(
      1, std::min({uint64_t{228 * 1024} / shared, 2048 / config.block.count(), uint64_t{32}}));
  const uint64_t most =
      std::max<uint64_t>(1, kMultiprocessors * of_multiprocessor / cluster_blocks);
  if (config.cooperative && all_clusters > most)
    throw Fault(kernel.name + ": a cooperative launch of more blocks than run at once");
  const Dim in_grid = {config.grid.x / config.cluster.x, config.grid.y / config.cluster.y,
                       config.grid.z / config.cluster.z};
  while (next_cluster < all_clusters && clusters.size() < most) {
    const Dim at = split(next_cluster++, in_grid);
    auto cluster = std::make_unique<Cluster>();
    for (uint64_t rank = 0; rank < cluster_blocks; ++rank) {
      const Dim in = split(rank, config.cluster);
      const Dim block = {at.x * config.cluster.x + in.x, at.y * config.cluster.y + in.y,
                         at.z * config.cluster.z + in.z};
      cluster->blocks.push_back(make_block(*this, *cluster, block, static_cast<int>(rank)));
      cluster->threads += cluster->blocks.back()->threads;
    }
    clusters.push_back(std::move(cluster));
  }
}

void Launch::run() {
  all_clusters = config.grid.count() / config.cluster.count();
  uint64_t seen = 0, since = 0;
  std::vector<Warp*> order;
  size_t ordered = ~size_t{0};
  while (next_cluster < all_clusters || !clusters.empty()) {
    start_clusters();
    if (ordered != next_cluster + (clusters.size() << 32)) {
      order.clear();
      for (const auto& cluster : clusters)
        for (const auto& block : cluster->blocks)
          for (const auto& warp : block->warps) order.push_back(warp.get());
      ordered = next_cluster + (clusters.size() << 32);
    }
    ++clock;
    run_pending();
    const size_t first = random() % order.size();
    bool ended = false;
    for (size_t k = 0; k < order.size(); ++k) {
      Warp& warp = *order[(first + k) % order.size()];
      if (!warp.groups.empty() && !turn(warp)) ended = true;
    }
    if (ended) {
      ++progress;
      std::erase_if(clusters, [&](const std::unique_ptr<Cluster>& cluster) {
        if (cluster->exited < cluster->threads) return false;
        for (const auto& block : cluster->blocks) finish(block.get());
        ordered = ~size_t{0};
        return true;
      });
    }
    if (progress != seen) {
      seen = progress;
      since = clock;
    } else if (clock - since > kMostIdle) {
      std::map<std::string, int> waiting;  // warps at a line
      for (const Warp* warp : order)
        for (const Group& group : warp->groups) {
          const Function& f = *group.frame->function;
          const Instruction& i = f.code[static_cast<size_t>(group.pc)];
          const Place& place = f.places[i.where];
          ++waiting[std::string(i.name) + " " + program.files[place.file] + ":" +
                    std::to_string(place.line) + " inlined at " +
                    program.files[place.inlined_file] + ":" + std::to_string(place.inlined_line)];
        }
      std::string where;
      for (const auto& [line, warps] : waiting)
        where += "\n  " + std::to_string(warps) + " warps at " + line;
      throw Fault(kernel.name + ": a deadlock. Who waits:" + where);
    }
  }
}

namespace {

class TextModule : public Module {
 public:
  explicit TextModule(std::string_view ptx) : program_(ptx) {}
  bool has_kernel(std::string_view name) const override { return program_.has(name); }
  std::vector<Parameter> parameters(std::string_view kernel) override {
    std::vector<Parameter> all;
    for (const Variable& v : program_.function(kernel).parameters)
      all.push_back({static_cast<size_t>(v.offset), v.bytes});
    return all;
  }
  void* variable(std::string_view name) override {
    const auto found = program_.globals.find(std::string(name));
    return found == program_.globals.end() || found->second.space != Space::kGlobal
               ? nullptr
               : reinterpret_cast<void*>(found->second.offset);
  }
  void run(std::string_view kernel, const LaunchConfig& config,
           std::span<const std::byte> parameters) override {
    const Function& function = program_.function(kernel);
    Launch launch{program_, function, config, parameters, std::mt19937_64(next_seed()), {}, 0,
                  0,        0,        0,      {}};
    if (function.cluster[0] > 0)
      launch.config.cluster = {function.cluster[0], function.cluster[1], function.cluster[2]};
    launch.run();
  }

 private:
  Program program_;
};

}  // namespace

std::unique_ptr<Module> load_module(std::string_view ptx) {
  return std::make_unique<TextModule>(ptx);
}

}  // namespace winnow::emulated
