// winnow run: a continuous-batching step loop through all six stages.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/kernel_table.h"
#include "layer.h"
#include "progress.h"
#include "start_ranks.h"
#include "table.h"
#include "whole/run_model.h"
#include "whole/spec.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::cli {

namespace {

struct RunOptions {
  std::string model = "v32", kernel;
  int32_t heads = 16, index_heads = 32, topk = 0;
  Limits limits;
  int64_t steps = 48;
  uint64_t seed = 1;
  bool check = false, json = false;
  RankedRun ranked;
  // Of a real model.
  int64_t layers = 0;
  std::string cache = "fp8", device = "cpu";
};

struct Counts {
  int64_t tokens = 0, decode = 0, arrived = 0, finished = 0, checked = 0;
  // Sums over tokens: keys (V4: states) that the indexer scored, those of them that it picked, and
  // all that were attended to (V4: the window, too).
  int64_t scored = 0, picked = 0, attended = 0;
  double seconds = 0;  // wall clock, inputs and checks included
};

// Planning itself has no kernel; V4's lists do.
constexpr Stage kPlanned[kTimed] = {Stage::kWrite,  Stage::kLists,  Stage::kScore,
                                    Stage::kSelect, Stage::kLocate, Stage::kAttend};

LayerOptions layer_options(const RunOptions& o) {
  LayerOptions l{.model = model_of(o.model), .heads = o.heads, .index_heads = o.index_heads};
  l.topk = o.topk > 0 ? o.topk : l.model.default_topk;
  l.limits = o.limits;
  l.kernel = o.kernel;
  l.seed = o.seed;
  l.limits.ratio = l.model.lists == 2 ? 4 : 1;
  return l;
}

void count_keys(const Layer& layer, const LayerOptions& o, Counts& n) {
  const Plan& plan = layer.plan();
  for (size_t t = 0; t < plan.key_ends().size(); ++t) {
    const int32_t scored = plan.key_ends()[t], picked = std::min(scored, o.topk);
    n.scored += scored;
    n.picked += picked;
    n.attended += picked + std::min(plan.positions()[t] + 1, o.model.window);
  }
}

// Keys per token of a stage; "" where it has none.
std::string keys_of(Timed stage, const Counts& n) {
  const auto mean = [&](int64_t keys) {
    return fmt::format("{:.0f}", static_cast<double>(keys) / static_cast<double>(n.tokens));
  };
  switch (stage) {
    case kScoreTime: return mean(n.scored);
    case kSelectTime:
    case kLocateTime: return mean(n.picked);
    case kAttendTime: return mean(n.attended);
    default: return "";
  }
}

std::string deviation_of(Timed stage, const StageCheck& c) {
  if (stage == kPlanTime) return "-";
  if (c.compared == 0) return "not checked";
  if (!c.ok) return "FAILED: " + c.note;
  if (stage == kScoreTime || stage == kAttendTime)
    return fmt::format("{:.3f} of its bound", c.worst);
  return "exact";
}

void print_table(const Layer& layer, const Counts& n, int64_t steps) {
  double all = 0;
  for (const StageTotal& t : layer.totals()) all += t.seconds;
  tools::Table table({"stage", "kernel", ">ms/step", ">share", ">keys/token", ">tokens/s",
                      ">GFLOP/s", ">GB/s", "deviation from the reference"});
  for (int s = 0; s < kTimed; ++s) {
    const StageTotal& t = layer.totals()[s];
    table.add({kTimedNames[s], layer.plan().kernel(kPlanned[s]),
               fmt::format("{:.3f}", 1e3 * t.seconds / static_cast<double>(steps)),
               fmt::format("{:.0f} %", 100 * t.seconds / all), keys_of(static_cast<Timed>(s), n),
               fmt::format("{:.0f}", static_cast<double>(n.tokens) / t.seconds),
               t.flops > 0 ? fmt::format("{:.1f}", 1e-9 * t.flops / t.seconds) : "",
               t.bytes > 0 ? fmt::format("{:.2f}", 1e-9 * t.bytes / t.seconds) : "",
               deviation_of(static_cast<Timed>(s), layer.checks()[s])});
  }
  table.add({"all", "", fmt::format("{:.3f}", 1e3 * all / static_cast<double>(steps)), "100 %", "",
             fmt::format("{:.0f}", static_cast<double>(n.tokens) / all)});
  fmt::print(
      "{} tokens in {} steps ({} decoded, {} prefilled); {} requests arrived, {} finished\n\n",
      n.tokens, steps, n.decode, n.tokens - n.decode, n.arrived, n.finished);
  fmt::print("{}", table.text());
  const auto each = static_cast<double>(n.tokens);
  fmt::print(
      "\nkeys/token: scored by the indexer, kept by select, attended to. Of the {:.0f} {} that a "
      "token sees, {:.0f} ({:.0f} %) are kept.\nof its bound: the largest error as a share of what "
      "rounding may cost at that place; above 1 is a failure.\n",
      static_cast<double>(n.scored) / each, layer.plan().options().ratio > 1 ? "states" : "keys",
      static_cast<double>(n.picked) / each,
      100 * static_cast<double>(n.picked) / static_cast<double>(std::max<int64_t>(n.scored, 1)));
}

void print_json(const RunOptions& o, const Layer& layer, const Counts& n, bool ok) {
  using json = nlohmann::ordered_json;
  json stages = json::array();
  for (int s = 0; s < kTimed; ++s) {
    const StageTotal& t = layer.totals()[s];
    const StageCheck& c = layer.checks()[s];
    stages.push_back({{"stage", kTimedNames[s]},
                      {"kernel", layer.plan().kernel(kPlanned[s])},
                      {"seconds", t.seconds},
                      {"calls", t.calls},
                      {"flops", t.flops},
                      {"bytes", t.bytes},
                      {"compared", c.compared},
                      {"worst", c.compared > 0 && c.ok ? json(c.worst) : json()},
                      {"ok", c.ok}});
  }
  fmt::print("{}\n", json{{"model", o.model},
                          {"heads", o.heads},
                          {"requests", o.limits.requests},
                          {"context", o.limits.context},
                          {"steps", o.steps},
                          {"tokens", n.tokens},
                          {"keys_scored", n.scored},
                          {"keys_kept", n.picked},
                          {"keys_attended", n.attended},
                          {"decoded", n.decode},
                          {"arrived", n.arrived},
                          {"finished", n.finished},
                          {"checked_steps", n.checked},
                          {"seconds", n.seconds},
                          {"stages", stages},
                          {"ok", ok}}
                         .dump(1));
}

// The same loop over ranks, which winnow-ranks runs.
int run_ranked(const RunOptions& o) {
  if (o.model != "v32")
    throw Error(ErrorCode::kUnsupported, "run: --ranks: expected --model v32, found " + o.model);
  if (o.heads % o.ranked.ranks != 0)
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("run: --heads: expected a multiple of --ranks {}, found {}",
                            o.ranked.ranks, o.heads));
  RankedRun r = o.ranked;
  r.json = o.json;
  const auto add = [&](const char* name, int64_t value) {
    r.options.insert(r.options.end(), {name, std::to_string(value)});
  };
  add("--heads", o.heads);
  add("--index-heads", o.index_heads);
  add("--topk", o.topk > 0 ? o.topk : kV32.default_topk);
  add("--requests", o.limits.requests);
  add("--context", o.limits.context);
  add("--step-tokens", o.limits.step_tokens);
  add("--page", o.limits.page);
  add("--steps", o.steps);
  add("--seed", static_cast<int64_t>(o.seed));
  if (!o.kernel.empty()) r.options.insert(r.options.end(), {"--kernel", o.kernel});
  return run_over_ranks(r);
}

int run_loop(const RunOptions& o) {
  if (o.ranked.ranks > 0) return run_ranked(o);
  const LayerOptions options = layer_options(o);
  Requests requests(options.limits, o.seed);
  Layer layer(options, requests);
  Counts n;
  const auto start = std::chrono::steady_clock::now();
  {
    tools::Progress progress;
    for (int64_t s = 0; s < o.steps; ++s) {
      const Step& step = requests.next();
      layer.run(step);
      if (o.check || s + 1 == o.steps) layer.check(step), ++n.checked;
      requests.done();
      count_keys(layer, options, n);
      n.tokens += step.tokens();
      n.decode += layer.plan().split().decode_tokens;
      n.arrived += static_cast<int64_t>(step.arrived.size());
      n.finished += step.finished;
      const std::string at = fmt::format("step {}/{}  {} decodes, {} prefills, {} tokens", s + 1,
                                         o.steps, step.decodes, step.prefills, step.tokens());
      s + 1 < o.steps ? progress.at(at) : progress.done(at);
    }
  }
  n.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  bool ok = true;
  for (const StageCheck& c : layer.checks()) ok &= c.ok;
  if (o.json) {
    print_json(o, layer, n, ok);
    return ok ? 0 : 1;
  }
  fmt::print("{} heads {} topk {} page {}, {} workers\n", o.model, o.heads, options.topk,
             options.limits.page, threads());
  print_table(layer, n, o.steps);
  const double worst =
      std::max(layer.checks()[kScoreTime].worst, layer.checks()[kAttendTime].worst);
  if (ok)
    fmt::print("\nlargest deviation from the reference: {:.3f} of its bound; {} step{} checked\n",
               worst, n.checked, n.checked == 1 ? "" : "s");
  else fmt::print("\ncheck FAILED\n");
  return ok ? 0 : 1;
}

bool is_real(const std::string& model) {
  const std::vector<std::string>& all = whole::models();
  return std::find(all.begin(), all.end(), model) != all.end();
}

// An option that the other kind of run has, whose models are `owners`.
void refuse(const CLI::App& cmd, std::initializer_list<const char*> options, const RunOptions& o,
            const std::string& owners) {
  for (const char* option : options)
    if (cmd.count(option) > 0)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("run: {}: of --model {} alone, found {}", option, owners, o.model));
}

// Small where nothing else is requested: a layer of a real model takes seconds on two cores.
int run_real(const CLI::App& cmd, const RunOptions& o) {
  refuse(cmd, {"--heads", "--index-heads", "--topk", "--ranks", "--spread", "--interleave"}, o,
         "v32 and v4");
  whole::RunModelOptions real{.model = o.model, .cache = o.cache, .device = o.device};
  real.kernel = o.kernel;
  real.layers = o.layers;
  real.limits = o.limits;
  if (cmd.count("--requests") == 0) real.limits.requests = 2;
  if (cmd.count("--context") == 0) real.limits.context = 288;
  if (cmd.count("--step-tokens") == 0) real.limits.step_tokens = 32;
  if (cmd.count("--steps") > 0) real.steps = o.steps;
  real.seed = o.seed;
  real.check = o.check;
  real.json = o.json;
  return whole::run_model(real);
}

// Before a plan refuses it, which has no option of this name, or each of many ranks does, of which
// a launcher prints more than the reason.
void check_kernel(const std::string& kernel) {
  const std::vector<KernelInfo> all = support();
  const auto named = [&](const KernelInfo& k) { return detail::means(kernel, k.kernel); };
  if (!kernel.empty() && std::none_of(all.begin(), all.end(), named))
    throw Error(ErrorCode::kInvalidArgument,
                "run: --kernel: expected a kernel of some stage, found " + kernel);
}

int run_family(const CLI::App& cmd, const RunOptions& o) {
  check_kernel(o.kernel);
  refuse(cmd, {"--layers", "--cache", "--device"}, o,
         fmt::format("{}", fmt::join(whole::models(), ", ")));
  return run_loop(o);
}

}  // namespace

void add_run(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      app.add_subcommand("run", "A batch of requests through every stage, step by step");
  cmd->footer(
      "Requests arrive, prefill, decode and finish; every step takes the batch through write, "
      "plan,\n"
      "score, select, locate and attend of one layer. Exit status: 1 if a check fails.\n"
      "A real model (v3.2, glm-5, v4-flash, v4-pro, v4.1-flash) brings its own sizes and the "
      "layers "
      "of its\nschedule, projections included; by default the first of each kind, and a small "
      "batch.\n"
      "Examples:\n"
      "  winnow run\n"
      "  winnow run --model v4-flash\n"
      "  winnow run --model v4 --check\n"
      "  winnow run --ranks 4 --spread queries\n"
      "  winnow run --heads 128 --requests 16 --context 8192 --json");
  auto o = std::make_shared<RunOptions>();
  std::vector<std::string> names = {"v32", "v4"};
  names.insert(names.end(), whole::models().begin(), whole::models().end());
  cmd->add_option("--model", o->model, "Model family, or a real model")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  cmd->add_option("--heads", o->heads, "Query heads of this rank")
      ->check(CLI::Range(kMinHeads, kMaxHeads))
      ->capture_default_str();
  cmd->add_option("--index-heads", o->index_heads, "Heads of the indexer")
      ->check(CLI::Range(kMinHeads, kMaxHeads))
      ->capture_default_str();
  cmd->add_option("--topk", o->topk, "Entries that the indexer picks (v32: 2048, v4: 512)")
      ->check(CLI::Range(1, 1 << 20));
  cmd->add_option("--requests", o->limits.requests, "Requests at the same time")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  cmd->add_option("--context", o->limits.context, "Longest sequence")
      ->check(CLI::Range(16, 1 << 24))
      ->capture_default_str();
  cmd->add_option("--step-tokens", o->limits.step_tokens, "Most tokens of a step")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  cmd->add_option("--page", o->limits.page, "Tokens per page")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  cmd->add_option("--steps", o->steps, "Steps")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  cmd->add_option("--kernel", o->kernel, "Kernel of every stage that has it (the fastest)");
  cmd->add_option("--seed", o->seed, "Of the random inputs")
      ->check(not_negative)
      ->capture_default_str();
  cmd->add_option("--ranks", o->ranked.ranks, "Over this many MPI ranks of this machine")
      ->check(CLI::Range(1, 1024));
  cmd->add_option("--spread", o->ranked.spread,
                  "With --ranks: what they share out; sharded: queries, over sharded caches")
      ->check(CLI::IsMember({"heads", "context", "queries", "sharded"}))
      ->needs("--ranks")
      ->capture_default_str();
  cmd->add_option("--interleave", o->ranked.interleave,
                  "With --ranks: consecutive positions on one rank")
      ->check(CLI::Range(1, 1 << 16))
      ->needs("--ranks")
      ->capture_default_str();
  cmd->add_option("--layers", o->layers, "Real model: the first of its schedule (one of each kind)")
      ->check(CLI::Range(int64_t{1}, int64_t{1000}));
  cmd->add_option("--cache", o->cache, "Real model: records of the caches")
      ->check(CLI::IsMember({"fp8", "bf16"}))
      ->capture_default_str();
  cmd->add_option("--device", o->device, "Real model: where it runs")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  cmd->add_flag("--check", o->check, "Compare every step with the reference (else the last)");
  cmd->add_flag("--json", o->json, "Print JSON");
  cmd->callback([o, cmd, &outcome] {
    outcome.code = is_real(o->model) ? run_real(*cmd, *o) : run_family(*cmd, *o);
  });
}

}  // namespace winnow::cli
