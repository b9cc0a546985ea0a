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

int run_layer(const LayerCommand& o) {
  const std::string model = full_name(o.model);
  const std::string kind = o.kind.empty() ? kinds_of(model).front() : o.kind;
  std::vector<Spec> specs;
  for (const std::string& k : with_source(model, kind))
    specs.push_back(resized(spec_of(model, k), o));
  check_sizes(model, specs.front(), o);
  if (specs.size() > 1 && !o.weights.empty())
    throw Error(ErrorCode::kInvalidArgument,
                "layer: --weights: a layer of kind " + kind + " needs those of its source as well");
  const Capacity capacity{.requests = o.requests,
                          .tokens = std::max(std::min(o.chunk, o.prompt * o.requests), o.requests),
                          .context = o.prompt + o.decode,
                          .page = o.page,
                          .bf16_caches = o.cache == "bf16",
                          .kernel = o.kernel};
  tools::Progress progress;
  progress.at("weights of " + model + " " + kind);
  Stack stack(specs, capacity,
              {.weights = o.weights,
               .prefix = o.prefix,
               .seed = o.seed,
               .cuda = o.device == "cuda",
               .check = o.check});
  Layer& layer = stack.layer(stack.size() - 1);

  // Prefill: chunks of one request after the other, several in a step where they fit.
  int64_t prefills = 0;
  std::vector<int64_t> done(static_cast<size_t>(o.requests));
  for (int64_t left = o.requests * o.prompt; left > 0; ++prefills) {
    Batch batch;
    for (int64_t r = 0; r < o.requests; ++r) {
      const int64_t room = capacity.tokens - batch.tokens();
      const int64_t count = std::min({room, o.chunk, o.prompt - done[r]});
      batch.add(static_cast<int32_t>(r), static_cast<int32_t>(done[r]),
                static_cast<int32_t>(count));
      done[r] += count;
      left -= count;
    }
    progress.at(fmt::format("prefill, {} tokens left", left));
    // A device loads its kernels when they are first asked for: that is not the layer's time.
    if (prefills == 0 && o.device == "cuda") {
      stack.run(batch);
      layer.forget_times();
    }
    stack.run(batch);
  }
  if (o.check && o.decode == 0) stack.check();
  const Totals prefill = layer.totals();
  const int64_t untimed = o.device == "cuda" && o.decode > 1 ? 1 : 0;
  layer.forget_times();
  for (int64_t d = 0; d < o.decode; ++d) {
    Batch batch;
    for (int64_t r = 0; r < o.requests; ++r)
      batch.add(static_cast<int32_t>(r), static_cast<int32_t>(o.prompt + d), 1);
    progress.at(fmt::format("decode {}/{}", d + 1, o.decode));
    stack.run(batch);
    if (d == 0 && untimed > 0) layer.forget_times();
  }
  progress.at("the reference in fp64");
  if (o.check && o.decode > 0) stack.check();
  progress.clear();
  const Checks& checks = stack.checks(stack.size() - 1);
  const Checks none = {};
  const bool ok = stack.ok();
  const Spec& s = layer.spec();
  if (o.json) {
    nlohmann::ordered_json j{{"model", model},
                             {"layer", kind},
                             {"device", o.device},
                             {"cache", o.cache},
                             {"hidden", s.hidden},
                             {"heads", s.heads},
                             {"requests", o.requests},
                             {"prompt", o.prompt},
                             {"prefill_steps", prefills},
                             {"decode_steps", o.decode},
                             {"weight_bytes", layer.weights().bytes()},
                             {"cache_bytes_per_token", layer.bytes_per_token()},
                             {"bytes_per_request", layer.bytes_per_request()},
                             {"prefill", json_of(layer, prefill, o.decode ? none : checks)},
                             {"decode", json_of(layer, layer.totals(), checks)},
                             {"ok", ok}};
    fmt::print("{}\n", j.dump(1));
    return ok ? 0 : 1;
  }
  fmt::print("{} {}: hidden {}, {} heads, {:.0f} MB of {} weights; {} caches, page {}, {}\n", model,
             kind, s.hidden, s.heads, 1e-6 * layer.weights().bytes(),
             o.weights.empty() ? "random" : "given", o.cache, o.page,
             o.device == "cuda" ? std::string("CUDA") : fmt::format("{} workers", threads()));
  fmt::print("a token adds {:.0f} B to the caches, a request holds {:.1f} KB besides\n",
             layer.bytes_per_token(), 1e-3 * layer.bytes_per_request());
  fmt::print("\nprefill: {} requests of {} tokens in {} steps\n{}", o.requests, o.prompt, prefills,
             table_of(layer, prefill, o.decode ? none : checks, prefills));
  if (o.decode > 0)
    fmt::print("\ndecode: {} steps of {} tokens\n{}", o.decode, o.requests,
               table_of(layer, layer.totals(), checks, o.decode - untimed));
  if (!o.check) return 0;
  fmt::print(
      "\ndeviation: |got - want| / |want| of all values up to there, as lengths, against the layer "
      "in fp64\n(logits: beside their terms); behind it what the roundings up to there may cost. "
      "{}\n",
      ok ? "All within." : "FAILED");
  return ok ? 0 : 1;
}

}  // namespace

void add_layer(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      app.add_subcommand("layer", "One attention layer of a model, projections included");
  cmd->footer(
      "Prompts are prefilled in chunks, then decoded; x and, without --weights, the weights are "
      "random.\nProjections are plain loops on the CPU and cuBLAS on CUDA; everything else is "
      "winnow's. The last\nstep is compared with the layer in fp64. Exit status: 1 if that fails.\n"
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
  cmd->add_option("--layer", o->kind, "Its kind (the model's most typical)");
  cmd->add_option("--weights", o->weights, "safetensors file with a checkpoint's names (random)")
      ->check(CLI::ExistingFile);
  cmd->add_option("--prefix", o->prefix, "What the names begin with, as layers.3.attn.")
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
  size("--rank", o->rank, "Their rank (the model's)", 1 << 14);
  cmd->add_option("--requests", o->requests, "Requests of the batch")
      ->check(CLI::Range(int64_t{1}, int64_t{4096}))
      ->capture_default_str();
  cmd->add_option("--prompt", o->prompt, "Tokens that each one prefills")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  cmd->add_option("--chunk", o->chunk, "Most tokens of a prefill step")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str();
  cmd->add_option("--decode", o->decode, "Decode steps behind it")
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
