// winnow plan: what a plan makes of a batch.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "commands.h"
#include "core/arithmetic.h"
#include "numbers.h"
#include "table.h"
#include "verb.h"
#include "winnow/plan.h"

namespace winnow::cli {

namespace {

using json = nlohmann::ordered_json;

struct PlanCommand {
  std::string model = "v32", mode = "auto", split = "balanced", kernel;
  std::vector<int32_t> query_lens = {1, 1, 1, 1, 200, 300}, seq_lens;
  int32_t heads = 16, threshold = 1, page = 64, split_size = 512;
  int64_t workspace_rows = 0;
  bool uniform = false, mha = false, json = false;
};

const std::vector<std::pair<std::string, Mode>> kModes = {{"auto", Mode::kAuto},
                                                          {"bf16", Mode::kBf16},
                                                          {"mixed", Mode::kMixed},
                                                          {"separate", Mode::kSeparate},
                                                          {"direct", Mode::kDirect}};

constexpr std::pair<const char*, Stage> kPlanned[] = {
    {"write", Stage::kWrite},  {"gather", Stage::kGather}, {"lists", Stage::kLists},
    {"score", Stage::kScore},  {"select", Stage::kSelect}, {"locate", Stage::kLocate},
    {"attend", Stage::kAttend}};
static_assert(std::size(kPlanned) == kStages);

std::string name_of(Mode mode) {
  for (const auto& [name, value] : kModes)
    if (value == mode) return name;
  return "?";
}

PlanOptions options_of(const PlanCommand& c, int32_t tokens, int32_t longest) {
  const Model& model = model_of(c.model);
  PlanOptions o{.model = model,
                .format = c.mode == "bf16" ? model.bf16 : model.fp8,
                .heads = c.heads,
                .extra_topk = model.lists == 2 ? model.default_topk : 0,
                .page = c.page};
  o.pages = ceil_div(int64_t{longest}, c.page) * static_cast<int64_t>(c.query_lens.size());
  o.max_requests = static_cast<int32_t>(c.query_lens.size());
  o.max_tokens = std::max(tokens, 1);
  o.max_context = std::max(longest, 1);
  o.decode_threshold = c.threshold;
  o.uniform_decode = c.uniform;
  o.mha = c.mha;
  o.workspace_rows = c.workspace_rows;
  o.split = c.split == "fixed" ? SplitPolicy::kFixed : SplitPolicy::kBalanced;
  o.split_size = c.split_size;
  for (const auto& [name, value] : kModes)
    if (name == c.mode) o.mode = value;
  if (!c.kernel.empty()) o.target.kernel = c.kernel.c_str();
  return o;
}

json as_json(const Plan& plan, double us, uint64_t tiles_digest) {
  const BatchSplit& s = plan.split();
  json parts = json::array(), kernels = json::object();
  int32_t index = 0;
  for (const Part& p : plan.parts())
    parts.push_back({{"tokens", {p.first_token, p.last_token}},
                     {"requests", {p.first_request, p.last_request}},
                     {"gathered", p.gathered},
                     {"mha", p.mha},
                     {"tiles", plan.schedule(index++).tiles.size()}});
  for (const auto& [name, stage] : kPlanned)
    kernels[name] = {{"kernel", plan.kernel(stage)}, {"passed_over", plan.reasons(stage)}};
  return {{"stage", "plan"},
          {"mode", name_of(plan.mode())},
          {"tokens", plan.tokens()},
          {"requests", plan.request_count()},
          {"decodes", s.decodes},
          {"prefills", s.prefills},
          {"decode_tokens", s.decode_tokens},
          {"prefill_tokens", s.prefill_tokens},
          {"parts", parts},
          {"kernels", kernels},
          {"workspace_bytes", plan.workspace_bytes()},
          {"gather_bytes", plan.gather_bytes()},
          {"us", us},
          {"digest", fmt::format("{:016x}", tiles_digest)}};
}

void print(const Plan& plan, double us, uint64_t tiles_digest) {
  const BatchSplit& s = plan.split();
  fmt::print("plan, mode {}\n", name_of(plan.mode()));
  fmt::print("  {:<12} {} requests, {} tokens\n", "batch", plan.request_count(), plan.tokens());
  fmt::print("  {:<12} {} decodes ({} tokens), {} prefills ({} tokens)\n", "split", s.decodes,
             s.decode_tokens, s.prefills, s.prefill_tokens);
  fmt::print("  {:<12} {} bytes, gathered KV {} bytes\n", "workspace", plan.workspace_bytes(),
             plan.gather_bytes());
  fmt::print("  {:<12} {:.1f} µs a refill\n", "time", us);
  fmt::print("  {:<12} {:016x}\n\n", "digest", tiles_digest);
  tools::Table parts({"part", ">tokens", ">requests", "reads", ">tiles", "tiles of each worker"});
  int32_t index = 0;
  for (const Part& p : plan.parts()) {
    const Schedule schedule = plan.schedule(index);
    std::vector<int32_t> load;
    for (size_t w = 0; w + 1 < schedule.worker_starts.size(); ++w)
      load.push_back(schedule.worker_starts[w + 1] - schedule.worker_starts[w]);
    parts.add({std::to_string(index++), fmt::format("{}..{}", p.first_token, p.last_token),
               fmt::format("{}..{}", p.first_request, p.last_request),
               p.mha        ? "decompressed"
               : p.gathered ? "gathered bf16"
                            : "pages",
               std::to_string(schedule.tiles.size()), fmt::format("{}", fmt::join(load, " "))});
  }
  fmt::print("{}\n", parts.text());
  tools::Table kernels({"stage", "kernel", "passed over"});
  for (const auto& [name, stage] : kPlanned)
    kernels.add({name, plan.kernel(stage), plan.reasons(stage)});
  fmt::print("{}", kernels.text());
}

void run_plan(PlanCommand c) {
  if (c.seq_lens.empty())  // decodes far into their context, prefills at their start
    for (const int32_t q : c.query_lens) c.seq_lens.push_back(q <= c.threshold ? 4096 : q);
  const int64_t tokens = std::accumulate(c.query_lens.begin(), c.query_lens.end(), int64_t{0});
  if (tokens > INT32_MAX)
    throw CLI::ValidationError("--query-lens",
                               fmt::format("{} tokens, more than {}", tokens, INT32_MAX));
  std::vector<int32_t> starts = {0};
  for (const int32_t q : c.query_lens) starts.push_back(starts.back() + q);
  const int32_t longest = *std::max_element(c.seq_lens.begin(), c.seq_lens.end());
  Plan plan(options_of(c, starts.back(), longest));
  double us = 1e30;
  for (int i = 0; i < 5; ++i) {
    const auto start = std::chrono::steady_clock::now();
    plan.refill({.query_starts = starts, .seq_lens = c.seq_lens});
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    us = std::min(us, took.count());
  }
  uint64_t sum = digest({});
  for (size_t p = 0; p < plan.parts().size(); ++p)
    sum = digest(std::as_bytes(plan.schedule(static_cast<int32_t>(p)).tiles), sum);
  if (c.json) fmt::print("{}\n", as_json(plan, us, sum).dump(1));
  else print(plan, us, sum);
}

}  // namespace

void add_plan(CLI::App& app, Outcome&) {
  CLI::App* cmd = app.add_subcommand("plan", "Split, parts, schedule and kernels of a batch");
  cmd->footer(
      "Examples:\n  winnow plan --query-lens 1,1,1,512 --seq-lens 4096,900,70000,2048\n"
      "  winnow plan --model v4 --mode separate --json");
  auto c = std::make_shared<PlanCommand>();
  add_numbers(*cmd, "--query-lens", c->query_lens, "New tokens of each request, decodes first",
              {0, 1 << 20});
  add_numbers(*cmd, "--seq-lens", c->seq_lens, "Tokens of each sequence, the new ones included",
              {0, 1 << 28});
  cmd->add_option("--model", c->model, "Model family")
      ->check(CLI::IsMember({"v32", "v4"}))
      ->capture_default_str();
  std::vector<std::string> modes;
  modes.reserve(std::size(kModes));
  for (const auto& [name, value] : kModes) modes.push_back(name);
  cmd->add_option("--mode", c->mode, "Which way prefills go")
      ->check(CLI::IsMember(modes))
      ->capture_default_str();
  cmd->add_option("--split", c->split, "How lists are cut into tiles")
      ->check(CLI::IsMember({"balanced", "fixed"}))
      ->capture_default_str();
  cmd->add_option("--split-size", c->split_size, "Of --split fixed")
      ->check(CLI::Range(1, INT32_MAX))
      ->capture_default_str();
  cmd->add_option("--heads", c->heads, "Query heads of this rank")
      ->check(CLI::Range(kMinHeads, kMaxHeads))
      ->capture_default_str();
  cmd->add_option("--threshold", c->threshold, "Longest query of a decode")
      ->check(CLI::Range(0, INT32_MAX))
      ->capture_default_str();
  cmd->add_option("--page", c->page, "Tokens per page")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  cmd->add_option("--workspace-rows", c->workspace_rows,
                  "Of --mode separate (5 x longest, or what the pages hold)")
      ->check(CLI::Range(int64_t{0}, int64_t{INT32_MAX}));
  cmd->add_option("--kernel", c->kernel, "Kernel of every stage");
  cmd->add_flag("--mha", c->mha, "Of --mode auto, v32: prefills may go per head, decompressed");
  cmd->add_flag("--uniform", c->uniform, "Decodes of one length only");
  cmd->add_flag("--json", c->json, "Print JSON");
  cmd->callback([c] { run_plan(*c); });
}

}  // namespace winnow::cli
