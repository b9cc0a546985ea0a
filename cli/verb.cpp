#include "verb.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/kernel_table.h"
#include "winnow/rotate.h"

namespace winnow::cli {

void add_common(CLI::App& cmd, VerbOptions& o, Over over) {
  cmd.add_option("--batch", o.sizes.batch, "Requests")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  cmd.add_option("--s-q", o.sizes.s_q, "Query tokens of each request")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str();
  if (over != Over::kTokens)
    cmd.add_option("--context", o.sizes.context, "Tokens (or keys) of each request")
        ->check(CLI::Range(int64_t{1}, int64_t{1} << 28))
        ->capture_default_str();
  if (over == Over::kPages)
    cmd.add_option("--page", o.sizes.page, "Tokens per page")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
  cmd.add_option("--seed", o.sizes.seed, "Of the random inputs")
      ->check(not_negative)
      ->capture_default_str();
  cmd.add_option("--kernel", o.kernel, "Kernel to run (the fastest that fits)");
  cmd.add_option("--repeat", o.repeat, "Runs; the best is printed")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  cmd.add_flag("!--no-check", o.check, "Do not compare with the reference");
  cmd.add_flag("--json", o.json, "Print JSON");
}

void add_model(CLI::App& cmd, VerbOptions& o) {
  cmd.add_option("--model", o.model, "Model family")
      ->check(CLI::IsMember({"v32", "v4"}))
      ->capture_default_str();
}

void add_heads(CLI::App& cmd, VerbOptions& o) {
  cmd.add_option("--heads", o.sizes.heads, "Query heads of this rank")
      ->check(CLI::Range(kMinHeads, kMaxHeads))
      ->capture_default_str();
}

void resolve(VerbOptions& o) {
  o.sizes.model = model_of(o.model);
  if (const int64_t tokens = o.sizes.batch * o.sizes.s_q; tokens > INT32_MAX)
    throw CLI::ValidationError(
        "--batch", fmt::format("{} tokens with --s-q, more than {}", tokens, INT32_MAX));
}

void time_trial(Trial& trial, const VerbOptions& options,
                const std::function<void(const char*)>& call) {
  const char* kernel = options.kernel.empty() ? nullptr : options.kernel.c_str();
  trial.progress.at(trial.stage + ": first run");
  const auto began = std::chrono::steady_clock::now();
  call(kernel);
  // Short runs follow each other without a line between them, which would disturb them.
  const bool slow = std::chrono::steady_clock::now() - began > std::chrono::milliseconds(50);
  trial.kernel = detail::last_chosen();
  trial.us = 1e30;
  for (int64_t r = 0; r < options.repeat; ++r) {
    if (slow) trial.progress.at(fmt::format("{}: run {}/{}", trial.stage, r + 1, options.repeat));
    const auto start = std::chrono::steady_clock::now();
    call(kernel);
    const std::chrono::duration<double, std::micro> us = std::chrono::steady_clock::now() - start;
    trial.us = std::min(trial.us, us.count());
  }
  // The caller's next step, which may take a hundred times as long.
  if (options.check) trial.progress.at(trial.stage + ": comparing with the reference");
}

uint64_t digest(std::span<const std::byte> bytes, uint64_t seed) {
  for (const std::byte b : bytes) seed = (seed ^ std::to_integer<uint64_t>(b)) * 0x100000001b3u;
  return seed;
}

int report(const Trial& t, bool json) {
  t.progress.clear();
  const std::string hex = fmt::format("{:016x}", t.digest);
  const double tflops = t.flops / t.us * 1e-6, gbps = t.bytes / t.us * 1e-3;
  if (json) {
    nlohmann::ordered_json shapes = nlohmann::ordered_json::object();
    for (const auto& [name, view] : t.tensors) shapes[name] = shape_of(view);
    const auto number = [](double x) {
      return x > 0 ? nlohmann::ordered_json(x) : nlohmann::ordered_json();
    };
    fmt::print("{}\n", nlohmann::ordered_json{{"stage", t.stage},
                                              {"kernel", t.kernel},
                                              {"shapes", shapes},
                                              {"us", t.us},
                                              {"tflops", number(tflops)},
                                              {"gbps", number(gbps)},
                                              {"digest", hex},
                                              {"deviation", t.deviation},
                                              {"ok", t.ok}}
                           .dump(1));
    return t.ok ? 0 : 1;
  }
  fmt::print("{} by {}\n", t.stage, t.kernel);
  for (const auto& [name, view] : t.tensors) fmt::print("  {:<12} {}\n", name, shape_of(view));
  fmt::print("  {:<12} {:.1f} µs", "time", t.us);
  if (t.flops > 0) fmt::print(", {:.1f} GFLOP/s", 1e3 * tflops);
  if (t.bytes > 0) fmt::print(", {:.2f} GB/s", gbps);
  fmt::print("\n  {:<12} {}\n", "digest", hex);
  if (!t.deviation.empty())
    fmt::print("  {:<12} {}: {}\n", "reference", t.ok ? "ok" : "FAILED", t.deviation);
  return t.ok ? 0 : 1;
}

namespace {

// A unit of either value before RoPE reaches both values of the pair, whose length the turn keeps;
// the turned value rounds once more.
std::vector<float> magnitudes_of_turned(const Tensor& out) {
  const int64_t width = out.shape[out.rank - 1];
  std::vector<float> of(static_cast<size_t>(out.size()));
  for (int64_t i = 0; i < out.size(); i += 2) {
    const double u = tools::element(out, i), v = tools::element(out, i + 1);
    const bool pair = i % width >= width - kRopeDim;
    of[i] = static_cast<float>(pair ? std::abs(u) + std::hypot(u, v) : std::abs(u));
    of[i + 1] = static_cast<float>(pair ? std::abs(v) + std::hypot(u, v) : std::abs(v));
  }
  return of;
}

}  // namespace

int try_out(const Single& verb, const VerbOptions& o,
            const std::function<void(const char*)>& call) {
  Trial trial{.stage = verb.stage, .flops = verb.flops, .bytes = verb.bytes};
  trial.tensors = {{"out", verb.out}};
  time_trial(trial, o, call);
  const auto* data = static_cast<const std::byte*>(verb.out.data);
  std::vector<std::byte> got(data, data + verb.out.size() * size_of(verb.out.dtype));
  trial.digest = digest(got);
  if (o.check) {
    call("reference");
    Tensor view = verb.out;
    view.data = got.data();
    std::vector<float> magnitudes;
    Tensor magnitude;
    if (verb.turned) {
      magnitudes = magnitudes_of_turned(verb.out);
      magnitude = tensor(magnitudes.data(), {verb.out.size()});
    }
    const tools::Deviation d = tools::compare(view, verb.out, verb.bar, magnitude);
    trial.ok = d.ok;
    trial.deviation = d.text(verb.out);
  }
  return report(trial, o.json);
}

}  // namespace winnow::cli
