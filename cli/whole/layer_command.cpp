// winnow layer: one attention layer of a real model, from projections to output.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "progress.h"
#include "whole/report.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::cli {

namespace {

using namespace whole;

struct LayerCommand {
  std::string model = "v4", kind, device = "cpu", cache = "fp8", kernel, weights, prefix;
  // Instead of the model's own; 0 keeps those.
  int64_t hidden = 0, heads = 0, q_lora = 0, index_heads = 0, topk = 0, groups = 0, rank = 0;
  int64_t requests = 2, prompt = 160, chunk = 128, decode = 4;
  int32_t page = 64;
  uint64_t seed = 1;
  bool check = true, json = false;
};

std::string full_name(const std::string& model) {
  if (model == "v4") return "v4-flash";
  if (model == "v4.1") return "v4.1-flash";
  if (model == "v32") return "v3.2";
  return model == "glm" ? "glm-5" : model;
}

Spec resized(Spec s, const LayerCommand& o) {
  const auto set = [](int64_t& to, int64_t value) {
    if (value > 0) to = value;
  };
  set(s.hidden, o.hidden);
  set(s.heads, o.heads);
  set(s.q_lora, o.q_lora);
  if (s.indexed()) set(s.index_heads, o.index_heads);
  set(s.topk, o.topk);
  if (s.groups > 0) {
    set(s.groups, o.groups);
    set(s.rank, o.rank);
    if (o.groups == 0 && o.heads > 0) s.groups = std::max<int64_t>(1, s.heads / 8);
    if (s.heads % s.groups != 0)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("layer: --groups: expected a divisor of {} heads, found {}", s.heads,
                              s.groups));
  }
  return s;
}

// A size that the model does not have would change nothing. Kinds of one model may share a command.
void check_sizes(const std::string& model, const Spec& s, const LayerCommand& o) {
  if (s.groups == 0 && (o.groups > 0 || o.rank > 0))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("layer: {}: {} has none", o.groups > 0 ? "--groups" : "--rank", model));
}

// The layer, and those before it whose caches or choice it reads.
std::vector<Spec> specs_of(const LayerCommand& o, const std::string& model,
                           const std::string& kind) {
  std::vector<Spec> specs;
  for (const std::string& k : with_source(model, kind))
    specs.push_back(resized(spec_of(model, k), o));
  check_sizes(model, specs.front(), o);
  if (specs.size() > 1 && !o.weights.empty())
    throw Error(ErrorCode::kInvalidArgument,
                "layer: --weights: a layer of kind " + kind + " needs those of its source as well");
  return specs;
}

Capacity capacity_of(const LayerCommand& o) {
  return {.requests = o.requests,
          .tokens = std::max(std::min(o.chunk, o.prompt * o.requests), o.requests),
          .context = o.prompt + o.decode,
          .page = o.page,
          .bf16_caches = o.cache == "bf16",
          .kernel = o.kernel};
}

// What a layer did: its times in both phases, and the steps that were timed.
struct Phases {
  Totals prefill, decode;
  int64_t prefill_steps = 0, decode_steps = 0;
};

// Chunks of one request after the other, several in a step where they fit.
void prefill(Stack& stack, const LayerCommand& o, tools::Progress& progress, Phases& phases) {
  Layer& layer = stack.layer(stack.size() - 1);
  const int64_t most = capacity_of(o).tokens;
  std::vector<int64_t> done(static_cast<size_t>(o.requests));
  for (int64_t left = o.requests * o.prompt; left > 0; ++phases.prefill_steps) {
    Batch batch;
    for (int64_t r = 0; r < o.requests; ++r) {
      const int64_t room = most - batch.tokens();
      const int64_t count = std::min({room, o.chunk, o.prompt - done[r]});
      batch.add(static_cast<int32_t>(r), static_cast<int32_t>(done[r]),
                static_cast<int32_t>(count));
      done[r] += count;
      left -= count;
    }
    progress.at(fmt::format("prefill, {} tokens left", left));
    // A device loads its kernels at their first launch: that is not the layer's time.
    if (phases.prefill_steps == 0 && o.device == "cuda") {
      stack.run(batch);
      layer.forget_times();
    }
    stack.run(batch);
  }
  phases.prefill = layer.totals();
  layer.forget_times();
}

void decode(Stack& stack, const LayerCommand& o, tools::Progress& progress, Phases& phases) {
  Layer& layer = stack.layer(stack.size() - 1);
  const int64_t untimed = o.device == "cuda" && o.decode > 1 ? 1 : 0;
  for (int64_t d = 0; d < o.decode; ++d) {
    Batch batch;
    for (int64_t r = 0; r < o.requests; ++r)
      batch.add(static_cast<int32_t>(r), static_cast<int32_t>(o.prompt + d), 1);
    progress.at(fmt::format("decode {}/{}", d + 1, o.decode));
    stack.run(batch);
    if (d == 0 && untimed > 0) layer.forget_times();
  }
  phases.decode = layer.totals();
  phases.decode_steps = o.decode - untimed;
}

// The last step is the one that was checked: a decode if there were any.
std::string json_text(Stack& stack, const LayerCommand& o, const std::string& model,
                      const std::string& kind, const Phases& phases) {
  const Layer& layer = stack.layer(stack.size() - 1);
  const Checks& checks = stack.checks(stack.size() - 1);
  const Spec& s = layer.spec();
  return nlohmann::ordered_json{
      {"model", model},
      {"layer", kind},
      {"device", o.device},
      {"cache", o.cache},
      {"hidden", s.hidden},
      {"heads", s.heads},
      {"requests", o.requests},
      {"prompt", o.prompt},
      {"prefill_steps", phases.prefill_steps},
      {"decode_steps", o.decode},
      {"weight_bytes", layer.weights().bytes()},
      {"cache_bytes_per_token", layer.bytes_per_token()},
      {"bytes_per_request", layer.bytes_per_request()},
      {"prefill", json_of(layer, phases.prefill, o.decode ? Checks{} : checks)},
      {"decode", json_of(layer, phases.decode, checks)},
      {"ok", stack.ok()}}
      .dump(1);
}

void print_tables(Stack& stack, const LayerCommand& o, const std::string& model,
                  const std::string& kind, const Phases& phases) {
  const Layer& layer = stack.layer(stack.size() - 1);
  const Checks& checks = stack.checks(stack.size() - 1);
  const Spec& s = layer.spec();
  fmt::print("{} {}: hidden {}, {} heads, {:.0f} MB of {} weights; {} caches, page {}, {}\n", model,
             kind, s.hidden, s.heads, 1e-6 * layer.weights().bytes(),
             o.weights.empty() ? "random" : "given", o.cache, o.page,
             o.device == "cuda" ? std::string("CUDA") : fmt::format("{} workers", threads()));
  fmt::print("a token adds {:.0f} B to the caches, a request holds {:.1f} KB besides\n",
             layer.bytes_per_token(), 1e-3 * layer.bytes_per_request());
  fmt::print("\nprefill: {} requests of {} tokens in {} steps\n{}", o.requests, o.prompt,
             phases.prefill_steps,
             table_of(layer, phases.prefill, o.decode ? Checks{} : checks, phases.prefill_steps));
  if (o.decode > 0)
    fmt::print("\ndecode: {} steps of {} tokens\n{}", o.decode, o.requests,
               table_of(layer, phases.decode, checks, phases.decode_steps));
  if (!o.check) return;
  fmt::print(
      "\ndeviation: |got - want| / |want| over all values of the stage, against the layer in fp64 "
      "(logits:\nrelative to the sum of their terms), and the bound that the roundings up to there "
      "allow. {}\n",
      stack.ok() ? "All within." : "FAILED");
}

int run_layer(const LayerCommand& o) {
  const std::string model = full_name(o.model);
  const std::string kind = o.kind.empty() ? kinds_of(model).front() : o.kind;
  tools::Progress progress;
  progress.at("weights of " + model + " " + kind);
  Stack stack(specs_of(o, model, kind), capacity_of(o),
              {.weights = o.weights,
               .prefix = o.prefix,
               .seed = o.seed,
               .cuda = o.device == "cuda",
               .check = o.check});
  Phases phases;
  prefill(stack, o, progress, phases);
  decode(stack, o, progress, phases);
  progress.at("the reference in fp64");
  if (o.check) stack.check();
  progress.clear();
  if (o.json) fmt::print("{}\n", json_text(stack, o, model, kind, phases));
  else print_tables(stack, o, model, kind, phases);
  return stack.ok() ? 0 : 1;
}

}  // namespace

void add_layer(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      app.add_subcommand("layer", "One attention layer of a model, projections included");
  cmd->footer(
      "Prompts are prefilled in chunks, then decoded; x and, without --weights, the weights are "
      "random.\nProjections are plain loops on the CPU and cuBLAS on CUDA; everything else is "
      "winnow's. The last\nstep is compared with the layer in fp64. Exit status: 1 if it is off.\n"
      "Layers: v3.2 full; glm-5 full, shared; v4 c4a, c128a, sliding; v4.1 c2a, c1a, reindex, "
      "reuse, "
      "sliding.\n"
      "Examples:\n"
      "  winnow layer --model v4 --layer c4a\n"
      "  winnow layer --model v3.2 --prompt 64 --cache bf16 --json\n"
      "  winnow layer --model v4-pro --layer c128a --weights model-00003.safetensors --prefix "
      "layers.3.attn.");
  auto o = std::make_shared<LayerCommand>();
  std::vector<std::string> names = {"v4", "v4.1", "v32", "glm"};
  names.insert(names.end(), models().begin(), models().end());
  cmd->add_option("--model", o->model, "Whose layer; v4 and v4.1 are the Flash models")
      ->check(CLI::IsMember(names))
      ->capture_default_str();
  cmd->add_option("--layer", o->kind, "Its kind, listed below (the model's most typical)");
  cmd->add_option("--weights", o->weights, "safetensors file with a checkpoint's names (random)")
      ->check(CLI::ExistingFile);
  cmd->add_option("--prefix", o->prefix, "Prefix of their names, for example layers.3.attn.")
      ->needs("--weights");
  const auto size = [&](const char* name, int64_t& to, const char* what, int64_t most) {
    cmd->add_option(name, to, what)->check(CLI::Range(int64_t{1}, most));
  };
  size("--hidden", o->hidden, "Hidden size (the model's)", 1 << 16);
  size("--heads", o->heads, "Query heads (the model's)", kMaxHeads);
  size("--q-lora", o->q_lora, "Query latent (the model's)", 1 << 14);
  size("--index-heads", o->index_heads, "Heads of the indexer (the model's)", kMaxHeads);
  size("--topk", o->topk, "Entries that the indexer picks (the model's)", 1 << 20);
  size("--groups", o->groups, "Groups of the output projection (the model's)", kMaxHeads);
  size("--rank", o->rank, "Rank of the output projection (the model's)", 1 << 14);
  cmd->add_option("--requests", o->requests, "Requests of the batch")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str();
  cmd->add_option("--prompt", o->prompt, "Tokens that each one prefills")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  cmd->add_option("--chunk", o->chunk, "Most tokens of a prefill step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  cmd->add_option("--decode", o->decode, "Decode steps after the prompt")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->capture_default_str();
  cmd->add_option("--cache", o->cache, "Records of the caches")
      ->check(CLI::IsMember({"fp8", "bf16"}))
      ->capture_default_str();
  cmd->add_option("--page", o->page, "Records per page")
      ->check(CLI::Range(1, 1 << 16))
      ->capture_default_str();
  cmd->add_option("--device", o->device, "Where it runs")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  cmd->add_option("--kernel", o->kernel, "Kernel of every verb (the fastest)");
  cmd->add_option("--seed", o->seed, "Of the random inputs")
      ->check(not_negative)
      ->capture_default_str();
  cmd->add_flag("!--no-check", o->check, "Do not compare with the layer in fp64");
  cmd->add_flag("--json", o->json, "Print JSON");
  cmd->callback([o, &outcome] { outcome.code = run_layer(*o); });
}

}  // namespace winnow::cli
