// One lane of `winnow soak`: a layer of its own that takes random batches through pipeline(), and
// the reference that it is compared with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "buffer.h"
#include "random.h"
#include "requests.h"
#include "soak_device.h"
#include "winnow/winnow.h"

namespace winnow::cli {

struct LaneOptions {
  Model model = kV32;
  bool cuda = false;
  int64_t check_every = 64;  // steps
  int64_t damage_step = 0;   // behind which a byte of the cache is flipped; 0: never
  uint64_t seed = 1;
};

struct LaneCounts {
  int64_t steps = 0, tokens = 0, arrived = 0, finished = 0, evicted = 0;
  int64_t mode_changes = 0, plans = 0, checked = 0, replays = 0;
  double worst = 0;  // share of its bound that the worst checked element used
};

// Host memory, and the device's where a call runs there.
template <class T>
struct Mirror {
  tools::Buffer<T> host;
  DeviceMemory device;

  Mirror(const Queue& queue, int64_t count)
      : host(count), device(queue.cuda() ? static_cast<size_t>(count) * sizeof(T) : 0) {}
  // What a call is given: where it runs.
  T* at(const Queue& queue) const {
    return queue.cuda() ? reinterpret_cast<T*>(device.data()) : host.data();
  }
  void upload(const Queue& queue) const {
    queue.to_device(device.data(), host.data(), host.size() * sizeof(T));
  }
  void download(const Queue& queue) const {
    queue.to_host(host.data(), device.data(), host.size() * sizeof(T));
  }
};

// A paged cache and its shadow, which the reference writes.
struct SoakCache {
  CacheFormat format;
  int32_t page;
  int64_t pages;
  Mirror<std::byte> memory;
  tools::Buffer<std::byte> shadow;

  SoakCache(const Queue& queue, CacheFormat f, int32_t page_, int64_t pages_);
  Cache cache(std::byte* data) const {
    return {.data = data, .format = format, .pages = pages, .page = page};
  }
};

class SoakLane {
 public:
  explicit SoakLane(const LaneOptions& options);

  // A random batch, checked if it is its turn. Throws Error when the result is off.
  void step();
  // The last batch again, captured once and replayed in bursts: the same bits after every burst.
  void replay(int64_t times);

  const LaneCounts& counts() const { return counts_; }

 private:
  static constexpr int kModes = 4;
  struct Planned {
    std::unique_ptr<Plan> plan, reference;
    std::unique_ptr<DeviceMemory> device;  // the workspace, where it runs
    tools::Buffer<std::byte> workspace, reference_workspace;
  };
  struct Results {
    tools::Buffer<bf16> out;
    tools::Buffer<float> lse;
  };

  bool v4() const { return options_.model.lists == 2; }
  Limits limits() const;
  PlanOptions plan_options(int mode, bool reference) const;
  void make_plan(int mode);
  void write_prefix(const Request& request);
  void write_both(SoakCache& to, const Mirror<bf16>& rows, const Mirror<int64_t>& slots, int64_t n);
  void draw_inputs(const Step& step);
  PipelineArgs args(bool reference);
  void run_batch(const Step& step);
  void damage();
  void check();
  void check_cache(const SoakCache& c, const char* name) const;
  Tensor logit_rounding();

  LaneOptions options_;
  tools::Random random_;
  Queue queue_;
  Requests requests_;
  Planned planned_[kModes];
  int mode_ = 0;
  int64_t tokens_ = 0, rows_ = 0;  // of the last batch, padding included; its requests
  SoakCache main_, states_, keys_;
  Mirror<bf16> kv_, state_kv_, index_k_, q_, out_;
  Mirror<int64_t> slots_, state_slots_;
  Mirror<int32_t> table_, state_table_;
  Mirror<e4m3> index_q_;
  Mirror<float> weights_, sink_, lse_;
  tools::Buffer<float> rounding_;
  Results want_;
  LaneCounts counts_;
};

}  // namespace winnow::cli
