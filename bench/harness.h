// The benchmark form: cases register, the harness times them, compares them with the machine's
// measured roofs and with the peers' stored figures, and prints or stores the table.
//
// A stage's src/<stage>/<verb>_bench.cpp registers a suite and measures its cases:
//
//   const bench::Suite suite("attend", "default", [](bench::Runner& runner) {
//     for (const std::string& kernel : runner.kernels())
//       runner.measure({.name = "decode", .kernel = kernel, ...}, [&] { attend(args); });
//   });
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "placement.h"
#include "progress.h"

namespace winnow::bench {

// What is measured. 0 and "" stand for "not applicable" (null in the JSON).
struct Case {
  std::string name;  // the harness appends " cold" or " warm", and " after code"
  std::string kernel;
  std::string model;
  int64_t heads = 0, topk = 0, extra = 0, batch = 0, s_q = 0, context = 0;
  double flops = 0;  // of one run
  double bytes = 0;  // that one run has to move when nothing is cached
  bool fp8 = false;  // products of e4m3: twice the rate of the tensor cores
};

struct Result {
  Case of;
  std::string stage, device;
  bool cold = true;
  double us = 0;  // best on the CPU (noisy neighbours only add), median on devices
  double best = 0, median = 0, spread = 0;  // spread: (90th - 10th percentile) / median
  int64_t runs = 0;
  double roof = 0;        // FLOP/s of the kernel's unit, best of the samples taken between the runs
  double roof_share = 0;  // time at the roofs / time; 0: no roof applies
  double copy_us = 0;     // of a plain copy of as many bytes, beside the case; 0: not taken
  std::string peer;
  double peer_us = 0;
};

// Ceilings of a device, measured in the same run. 0: the machine has no such unit.
struct Roofs {
  double fma = 0, bf16_dot = 0, amx = 0, tensor = 0;  // FLOP/s
  double read = 0, copy = 0;  // B/s; a copy counts what it reads and what it writes (CPU)
};

// How a case is timed in one visit.
struct Method {
  bool cold = true;
  bool after_code = false;  // each run after another kernel's code, as in a model (devices only)
  int64_t min_runs = 3, max_runs = 100;
  double seconds = 0.1;  // stop after this once min_runs are done
  // On the CPU: called before the first run, and then every few milliseconds with the best time
  // since the last call, in us.
  std::function<void(double us)> between;
};

// What the harness needs to know of a device. The CPU's is built in; the CUDA build adds one whose
// `time` captures the run in a graph, flushes L2 and replays it between events.
struct Backend {
  std::string device;  // "cpu", "cuda"
  std::function<std::vector<double>(const std::function<void()>& run, const Method&)> time;  // us
  std::function<Roofs()> roofs;
  std::function<std::string()> machine;  // "NVIDIA H200, driver 580.159"; "" when there is none
  bool use_median = true;
  std::function<double(const std::string& kernel)> roof;  // one short sample, FLOP/s; may be empty
  int rounds = 1;  // over all cases, if the options do not say
  // Times a plain copy that reads and writes `bytes` in all, as a case is timed; may be empty.
  std::function<std::vector<double>(double bytes, const Method&)> copy;
};
void add_backend(Backend backend);
const Backend* find_backend(const std::string& device);

struct Options {
  std::string device = "cpu", set = "default";
  std::string kernel;  // this one only; "" means every available one but the reference
  std::string filter;  // cases whose name contains it
  bool cold = true, warm = true;
  Method method;
  int rounds = 0;  // over all cases; 0: what the device requests
};

class Runner {
 public:
  explicit Runner(Options options);

  // Kernels of the stage that this machine can run and the options ask for.
  std::vector<std::string> kernels() const;
  const Options& options() const { return options_; }
  Device device() const { return device_of(options_.device.c_str()); }
  bool on_cuda() const { return options_.device == "cuda"; }
  // Whether the options ask for this case: to spare the set-up of one that they do not.
  bool wants(const Case& c) const;
  // Times `run` cold and warm, once more in every round, and says so (progress.h). A kernel that
  // refuses the shape is noted on stderr and left out.
  void measure(const Case& c, const std::function<void()>& run);

  void begin(const std::string& stage, int round) { stage_ = stage, round_ = round; }
  int rounds() const { return options_.rounds > 0 ? options_.rounds : backend_->rounds; }
  const Roofs& roofs() const { return roofs_; }
  // Measures the roofs once more, fills in times and shares, and gives the results.
  const std::vector<Result>& finish();

 private:
  struct Row {
    Result result;
    std::vector<double> us, shares;  // runs of all rounds; shares of the unit's roof
    std::vector<double> copies;      // runs of the copy
  };
  Row& row_of(const Case& c, bool cold);
  void report(const Row& row);
  double share_of(const Row& row) const;

  Options options_;
  const Backend* backend_;
  Roofs roofs_;
  std::string stage_;
  int round_ = 0;
  std::vector<Row> rows_;
  std::vector<Result> results_;
  tools::Progress progress_;
};

struct Suite {
  Suite(std::string stage, std::string set, std::function<void(Runner&)> run);
};
// Stages that have a suite, in the order of the flow; sets of a stage.
std::vector<std::string> stages();
std::vector<std::string> sets();
// Runs the suites of these stages (all when empty) and of the options' set.
std::vector<Result> run_suites(Runner& runner, const std::vector<std::string>& stages);

// Bytes of the last-level cache; 64 MiB when the system does not say.
int64_t cache_bytes();

}  // namespace winnow::bench
