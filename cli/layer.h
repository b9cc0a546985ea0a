// One layer's caches and buffers, and the six stages over them, call by call, each timed.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "buffer.h"
#include "random.h"
#include "requests.h"
#include "winnow/winnow.h"

namespace winnow::cli {

struct LayerOptions {
  Model model = kV32;
  int32_t heads = 16, index_heads = 32;
  int32_t topk = 2048;  // that the indexer picks
  Limits limits;
  std::string kernel;  // "" takes the fastest of each stage
  uint64_t seed = 1;
};

enum Timed { kWriteTime, kPlanTime, kScoreTime, kSelectTime, kLocateTime, kAttendTime, kTimed };
inline constexpr const char* kTimedNames[kTimed] = {"write",  "plan",   "score",
                                                    "select", "locate", "attend"};

struct StageTotal {
  double seconds = 0, flops = 0, bytes = 0;
  int64_t calls = 0;
};

// The largest deviation seen of a stage, as a share of its bound.
struct StageCheck {
  double worst = 0;
  int64_t compared = 0;  // elements
  bool ok = true;
  std::string note;  // of the first failure
};

class Layer {
 public:
  Layer(const LayerOptions& options, const Requests& requests);

  // Draws the step's inputs and takes them through all six stages.
  void run(const Step& step);
  // Compares what the last run left with the reference: everything for write, select and locate, a
  // sample of tokens and heads for score and attend, whose reference is slow.
  void check(const Step& step);

  const std::array<StageTotal, kTimed>& totals() const { return totals_; }
  const std::array<StageCheck, kTimed>& checks() const { return checks_; }
  const Plan& plan() const { return plan_; }

 private:
  bool v4() const { return options_.model.lists == 2; }
  void write_prefix(const Request& request);
  void draw_inputs(const Step& step);
  void write_tokens();
  template <class F>
  void timed(Timed stage, F&& call);
  void write_both(const WriteArgs& args, std::byte* shadow);

  // Arguments of the last run, for check().
  ScoreArgs score_args();
  SelectArgs select_args();
  LocateArgs locate_args();
  AttendArgs attend_args();
  void check_write();
  void check_score(int64_t token);
  void check_exact(Timed stage, const Tensor& got, const Tensor& want);
  void check_attend(int64_t token);

  LayerOptions options_;
  int32_t width_, state_width_;  // of the block tables
  int64_t keys_;                 // widest row of logits
  Plan plan_;
  tools::Random random_;
  int64_t tokens_ = 0, rows_ = 0;  // of the current step: tokens, requests

  // Caches, and shadows that the reference writes.
  tools::Buffer<std::byte> memory_, state_memory_, key_memory_;
  tools::Buffer<std::byte> shadow_, state_shadow_, key_shadow_;
  Cache cache_, states_, keys_cache_;
  // Inputs.
  tools::Buffer<bf16> kv_, state_kv_, index_k_, q_;
  tools::Buffer<e4m3> index_q_;
  tools::Buffer<float> weights_, sink_;
  tools::Buffer<int32_t> table_, state_table_;
  tools::Buffer<int64_t> slots_, state_slots_;
  // Between the stages, and outputs.
  tools::Buffer<float> logits_, lse_;
  tools::Buffer<int32_t> ids_, picked_, window_, window_lengths_;
  tools::Buffer<bf16> out_;
  tools::Buffer<std::byte> workspace_;

  std::array<StageTotal, kTimed> totals_;
  std::array<StageCheck, kTimed> checks_;
};

}  // namespace winnow::cli
