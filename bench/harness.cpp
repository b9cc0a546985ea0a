#include "harness.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "core/arithmetic.h"
#include "core/kernel_table.h"
#include "cpu/threads.h"
#include "peers.h"
#include "roofs.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::bench {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Registered {
  std::string stage, set;
  std::function<void(Runner&)> run;
};
std::vector<Registered>& registry() {
  static std::vector<Registered> suites;
  return suites;
}

// Evicts what the last run left: every worker reads its share of twice the last-level cache, four
// times, which clears the shared cache and the worker's own. Once leaves half of it on Zen 5, whose
// L3 protects what it holds from a stream: 2,048 scattered records took 23 us then, 35 after two
// times and 40 after four, but 34 where four times as much memory was read once. Read, not written:
// a long memset() passes by the caches (on Zen 5 it left them as they were), and lines that have
// changed would be written to memory at the cost of the run that takes their place.
class Flush {
 public:
  void operator()() {
    const int64_t workers = internal::cpu::threads(),
                  share = round_up(2 * cache_bytes() / workers, kLine);
    // Written once: pages that never were share one page of zeros.
    if (memory_.empty()) memory_.assign(share * workers, 1);
    internal::cpu::parallel_for(workers, [&](int64_t w, int) {
      const volatile char* line = memory_.data() + w * share;
      for (int pass = 0; pass < kPasses; ++pass)
        for (int64_t i = 0; i < share; i += kLine) (void)line[i];
    });
  }

 private:
  static constexpr int64_t kLine = 64;  // bytes
  static constexpr int kPasses = 4;
  std::vector<char> memory_;
};

std::vector<double> time_on_cpu(const std::function<void()>& run, const Method& method) {
  static Flush flush;
  constexpr double kSlice = 0.002;  // seconds from one sample of the roof to the next
  run();                            // page faults, threads, first-use tables
  if (method.between) method.between(0);
  std::vector<double> us;
  const auto begin = Clock::now();
  auto slice = begin;
  double best = 0;  // of this slice
  while (static_cast<int64_t>(us.size()) < method.max_runs &&
         (static_cast<int64_t>(us.size()) < method.min_runs ||
          seconds_since(begin) < method.seconds)) {
    if (method.cold) flush();
    const auto start = Clock::now();
    run();
    us.push_back(1e6 * seconds_since(start));
    best = best > 0 ? std::min(best, us.back()) : us.back();
    if (!method.between || seconds_since(slice) < kSlice) continue;
    method.between(best);
    best = 0;
    slice = Clock::now();
  }
  return us;
}

std::vector<Backend>& backends() {
  static std::vector<Backend> list = {{.device = "cpu",
                                       .time = time_on_cpu,
                                       .roofs = measure_cpu_roofs,
                                       .machine = [] { return cpu_name(); },
                                       .use_median = false,
                                       .roof = sample_cpu_roof,
                                       .rounds = 4}};
  return list;
}

double percentile(const std::vector<double>& sorted, double p) {
  return sorted[static_cast<size_t>(std::lround(p * static_cast<double>(sorted.size() - 1)))];
}

}  // namespace

void add_backend(Backend backend) { backends().push_back(std::move(backend)); }

const Backend* find_backend(const std::string& device) {
  for (const Backend& b : backends())
    if (b.device == device) return &b;
  return nullptr;
}

int64_t cache_bytes() {
  static const int64_t bytes = [] {
    const long found = sysconf(_SC_LEVEL3_CACHE_SIZE);
    return found > 0 ? static_cast<int64_t>(found) : int64_t{64} << 20;
  }();
  return bytes;
}

Suite::Suite(std::string stage, std::string set, std::function<void(Runner&)> run) {
  registry().push_back({std::move(stage), std::move(set), std::move(run)});
}

std::vector<std::string> stages() {
  std::vector<std::string> out;
  for (const char* stage : {"norm", "rotate", "prepare_query", "index_query", "prepare_queries",
                            "compress", "write", "norm_write", "plan", "score", "select", "locate",
                            "attend", "mha", "mask", "merge", "lists", "absorb", "cut"})
    for (const Registered& r : registry())
      if (r.stage == stage && (out.empty() || out.back() != stage)) out.push_back(stage);
  return out;
}

std::vector<std::string> sets() {
  std::vector<std::string> out;
  for (const Registered& r : registry())
    if (std::find(out.begin(), out.end(), r.set) == out.end()) out.push_back(r.set);
  std::sort(out.begin(), out.end());
  return out;
}

// Refuses a kernel that none of the stages has on the device, built or not.
static void check_kernel(const Options& o, const std::vector<std::string>& stages) {
  std::string names;
  for (const KernelInfo& k : support()) {
    if (k.device != o.device) continue;
    if (std::find(stages.begin(), stages.end(), k.stage) == stages.end()) continue;
    if (internal::core::detail::means(o.kernel, k.kernel)) return;
    const std::string name = stages.size() == 1 ? k.kernel : k.stage + "=" + k.kernel;
    names += (names.empty() ? "" : ", ") + name;
  }
  if (names.empty()) names = "none";
  const std::string whose = stages.size() == 1 ? stages.front() + " has" : "there are";
  throw Error(ErrorCode::kInvalidArgument, "bench: unknown kernel '" + o.kernel + "' on " +
                                               o.device + "; " + whose + ": " + names);
}

std::vector<Result> run_suites(Runner& runner, const std::vector<std::string>& only) {
  if (!runner.options().kernel.empty())
    check_kernel(runner.options(), only.empty() ? stages() : only);
  for (int round = 0; round < runner.rounds(); ++round)
    for (const std::string& stage : only.empty() ? stages() : only) {
      runner.begin(stage, round);
      for (const Registered& r : registry())
        if (r.stage == stage && r.set == runner.options().set) r.run(runner);
    }
  return runner.finish();
}

Runner::Runner(Options options)
    : options_(std::move(options)), backend_(find_backend(options_.device)) {
  if (!backend_)
    throw Error(ErrorCode::kUnsupported,
                "bench: --device " + options_.device + ": this build has no kernels for it");
  if (options_.method.after_code && !on_cuda())
    throw Error(
        ErrorCode::kUnsupported,
        "bench: after: expected nothing, found code (only a CUDA device has a mode for it)");
}

std::vector<std::string> Runner::kernels() const {
  std::vector<std::string> names;
  for (const KernelInfo& k : support()) {
    if (k.stage != stage_ || k.device != options_.device || !k.available) continue;
    // A family's kernels ("sm90/wide") go by its name unless one is requested: the library chooses.
    const std::string family = k.kernel.substr(0, k.kernel.find('/'));
    const bool itself = options_.kernel == k.kernel;
    const bool asked =
        options_.kernel.empty() ? k.kernel != "reference" : itself || options_.kernel == family;
    const std::string& name = itself ? k.kernel : family;
    if (asked && (names.empty() || names.back() != name)) names.push_back(name);
  }
  return names;
}

bool Runner::wants(const Case& c) const {
  return c.name.find(options_.filter) != std::string::npos;
}

// A kernel is held against the unit it uses, in the whole run or as it was sampled between the
// runs. Then the lower of two estimates counts: best run and best sample may be of different
// moments, and of slices the highest are those whose samples alone were slowed. Memory counts when
// nothing is cached.
double Runner::share_of(const Row& row) const {
  const Result& r = row.result;
  const double whole = roofs_.*unit_of(r.of.kernel) * (r.of.fp8 && r.device == "cuda" ? 2 : 1);
  const double unit = r.roof > 0 ? r.roof : whole;
  double arithmetic = unit > 0 ? r.of.flops / unit / (1e-6 * r.us) : 0;
  if (!row.shares.empty()) arithmetic = std::min(arithmetic, percentile(row.shares, 0.9));
  const double memory = roofs_.read > 0 && r.cold ? r.of.bytes / roofs_.read / (1e-6 * r.us) : 0;
  return std::max(arithmetic, memory);
}

// Neighbours on a virtual machine slow a roof as they slow a case: the best of all measurements is
// nearest the truth.
const std::vector<Result>& Runner::finish() {
  progress_.clear();
  if (rows_.empty()) return results_;
  const Roofs again = backend_->roofs();
  for (double Roofs::*unit :
       {&Roofs::fma, &Roofs::bf16_dot, &Roofs::amx, &Roofs::tensor, &Roofs::read, &Roofs::copy})
    roofs_.*unit = std::max(roofs_.*unit, again.*unit);
  for (Row& row : rows_) {
    Result& r = row.result;
    double& unit = roofs_.*unit_of(r.of.kernel);
    unit = std::max(unit, r.roof);
    std::sort(row.us.begin(), row.us.end());
    std::sort(row.shares.begin(), row.shares.end());
    r.best = row.us.front();
    r.median = percentile(row.us, 0.5);
    r.spread = (percentile(row.us, 0.9) - percentile(row.us, 0.1)) / r.median;
    r.us = backend_->use_median ? r.median : r.best;
    r.runs = static_cast<int64_t>(row.us.size());
    std::sort(row.copies.begin(), row.copies.end());
    if (!row.copies.empty()) r.copy_us = percentile(row.copies, 0.5);
    if (!options_.method.after_code) find_peer(r);  // theirs are of a kernel over and over
  }
  for (Row& row : rows_) {
    row.result.roof_share = share_of(row);
    results_.push_back(std::move(row.result));
  }
  rows_.clear();
  return results_;
}

Runner::Row& Runner::row_of(const Case& c, bool cold) {
  const std::string name =
      c.name + (cold ? " cold" : " warm") + (options_.method.after_code ? " after code" : "");
  for (Row& row : rows_)
    if (row.result.stage == stage_ && row.result.of.name == name &&
        row.result.of.kernel == c.kernel)
      return row;
  Result r{.of = c, .stage = stage_, .device = options_.device, .cold = cold};
  r.of.name = name;
  return rows_.emplace_back(Row{.result = std::move(r), .us = {}, .shares = {}, .copies = {}});
}

void Runner::measure(const Case& c, const std::function<void()>& run) {
  if (!wants(c)) return;
  if (rows_.empty()) roofs_ = backend_->roofs();
  for (const bool cold : {true, false}) {
    if (!(cold ? options_.cold : options_.warm)) continue;
    Method method = options_.method;
    method.cold = cold;
    double last = 0, best = 0;  // samples of the roof
    std::vector<double> us, shares;
    // A slice is held against the better of the samples around it: moments in which only one of
    // them was slowed do not raise the share.
    if (backend_->roof && c.flops > 0)
      method.between = [&](double slice_us) {
        const double now = backend_->roof(c.kernel), roof = std::max(last, now);
        if (slice_us > 0 && roof > 0) shares.push_back(c.flops / roof / (1e-6 * slice_us));
        last = now;
        best = std::max(best, now);
      };
    try {
      us = backend_->time(run, method);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::kUnsupported) throw;
      progress_.clear();
      if (round_ == 0) std::fprintf(stderr, "left out: %s: %s\n", c.name.c_str(), e.what());
      return;
    }
    // Of a family, the kernel that ran.
    Case ran = c;
    if (const char* last = detail::last_chosen(); detail::means(c.kernel, last)) ran.kernel = last;
    Row& row = row_of(ran, cold);
    row.result.roof = std::max(row.result.roof, best);
    row.us.insert(row.us.end(), us.begin(), us.end());
    row.shares.insert(row.shares.end(), shares.begin(), shares.end());
    // What moves bytes alone is also held against a copy that has as little time to start and end.
    if (backend_->copy && c.flops == 0 && c.bytes > 0) {
      const std::vector<double> copies = backend_->copy(c.bytes, method);
      row.copies.insert(row.copies.end(), copies.begin(), copies.end());
    }
    report(row);
  }
}

void Runner::report(const Row& row) {
  const Case& c = row.result.of;
  const double best = *std::min_element(row.us.begin(), row.us.end());
  const std::string round =
      rounds() > 1 ? fmt::format("round {}/{}  ", round_ + 1, rounds()) : std::string();
  progress_.at(fmt::format("{}{} {} {}: {:.1f} us", round, stage_, c.name, c.kernel, best));
}

}  // namespace winnow::bench
