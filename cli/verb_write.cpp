// winnow write: random latents into a paged cache.
#include <fmt/format.h>

#include <memory>

#include "accuracy.h"
#include "verb.h"

namespace winnow::cli {

namespace {

struct WriteOptions : VerbOptions {
  std::string format = "v32_fp8", scale = "default";
};

ScaleMode scale_of(const std::string& name) {
  if (name == "amax") return ScaleMode::kAmax;
  if (name == "pow2") return ScaleMode::kPow2;
  if (name == "pow2-floor-amax") return ScaleMode::kPow2FloorAmax;
  return ScaleMode::kDefault;
}

int run_write(WriteOptions o) {
  resolve(o);
  bench::WriteProblem p(o.sizes, format_of(o.format));
  p.args.scale = scale_of(o.scale);
  Trial trial{.stage = "write", .bytes = p.bytes()};
  const auto size = static_cast<int64_t>(p.memory.size());
  const Tensor pages = tensor(p.memory.data(), {p.args.cache.pages, size / p.args.cache.pages});
  trial.tensors = {{"kv", p.args.kv}, {"slots", p.args.slots}, {"cache", pages}};
  const auto call = [&](const char* kernel) {
    p.args.target.kernel = kernel;
    write(p.args);
  };
  time_trial(trial, o, call);
  trial.digest = digest(p.memory.span());
  if (o.check) {
    tools::Buffer<std::byte> want(size);
    WriteArgs a = p.args;
    a.cache.data = want.data();
    a.target.kernel = "reference";
    write(a);
    const tools::Deviation d =
        tools::compare(pages, tensor(want.data(), {pages.shape[0], pages.shape[1]}), tools::kExact);
    trial.ok = d.ok;
    trial.deviation = fmt::format("{} of {} bytes differ", d.wrong, d.count);
  }
  return report(trial, o.json);
}

}  // namespace

void add_write(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = app.add_subcommand("write", "Random latents into a paged cache");
  cmd->footer(
      "Examples:\n  winnow write --batch 256 --format v4_fp8\n"
      "  winnow write --format index_keys --scale amax --json");
  auto o = std::make_shared<WriteOptions>();
  o->sizes.batch = 64;
  o->sizes.context = 4096;
  add_common(*cmd, *o, Over::kPages);
  std::vector<std::string> formats;
  for (const CacheFormat f : cache_formats()) formats.emplace_back(name_of(f));
  cmd->add_option("--format", o->format, "Records to write")
      ->check(CLI::IsMember(formats))
      ->capture_default_str();
  cmd->add_option("--scale", o->scale, "How tiles are scaled")
      ->check(CLI::IsMember({"default", "amax", "pow2", "pow2-floor-amax"}))
      ->capture_default_str();
  cmd->callback([o, &outcome] { outcome.code = run_write(*o); });
}

}  // namespace winnow::cli
