// winnow select, winnow locate: the integer stages alone, held bit for bit against the reference.
#include <fmt/format.h>

#include <memory>

#include "accuracy.h"
#include "verb.h"

namespace winnow::cli {

namespace {

// Fills the trial's digest and deviation from an int32 output and the reference's.
void compare_exactly(Trial& trial, const Tensor& got, const Tensor& want) {
  const tools::Deviation d = tools::compare(got, want, tools::kExact);
  trial.ok = d.ok;
  trial.deviation = d.ok ? d.text(got)
                         : fmt::format("{} of {} differ, first worst at {}", d.wrong, d.count,
                                       tools::place(got, d.at));
}

int run_select(VerbOptions o, int64_t blocks) {
  resolve(o);
  bench::SelectProblem p(o.sizes);
  tools::Buffer<int32_t> best(o.sizes.tokens() * blocks);
  if (blocks > 0) {
    const Tensor list = tensor(best.data(), {o.sizes.tokens(), blocks});
    p.args.blocks.best = list;
    select(p.args);
    p.args.blocks = {.within = list};
  }
  Trial trial{.stage = "select", .bytes = p.bytes()};
  trial.tensors = {{"logits", p.args.logits}, {"ids", p.args.ids}};
  const auto call = [&](const char* kernel) {
    p.args.target.kernel = kernel;
    select(p.args);
  };
  time_trial(trial, o, call);
  trial.digest = digest(std::as_bytes(p.ids.span()));
  if (o.check) {
    tools::Buffer<int32_t> want(static_cast<int64_t>(p.ids.size()));
    SelectArgs a = p.args;
    a.ids.data = want.data();
    a.target.kernel = "reference";
    select(a);
    compare_exactly(trial, p.args.ids, a.ids);
  }
  return report(trial, o.json);
}

int run_locate(VerbOptions o) {
  resolve(o);
  bench::LocateProblem p(o.sizes);
  Trial trial{.stage = "locate", .bytes = p.bytes()};
  trial.tensors = {{"ids", p.args.ids},
                   {"block_table", p.args.block_table},
                   {"slots", p.args.slots},
                   {"counts", p.args.counts}};
  const auto call = [&](const char* kernel) {
    p.args.target.kernel = kernel;
    locate(p.args);
  };
  time_trial(trial, o, call);
  trial.digest = digest(std::as_bytes(p.slots.span()));
  if (o.check) {
    tools::Buffer<int32_t> want(static_cast<int64_t>(p.slots.size()));
    LocateArgs a = p.args;
    a.slots.data = want.data();
    a.counts = {};
    a.target.kernel = "reference";
    locate(a);
    compare_exactly(trial, p.args.slots, a.slots);
  }
  return report(trial, o.json);
}

}  // namespace

void add_select(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = app.add_subcommand("select", "Top-k of random logits");
  cmd->footer(
      "Examples:\n  winnow select --context 131072 --topk 2048\n"
      "  winnow select --blocks 2048 --topk 512     inside the best blocks of 8 columns (V4.1)\n"
      "  winnow select --batch 8 --kernel reference --json");
  auto o = std::make_shared<VerbOptions>();
  add_common(*cmd, *o, Over::kContext);
  auto blocks = std::make_shared<int64_t>(0);
  cmd->add_option("--blocks", *blocks, "Find this many blocks first and select inside them")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20));
  cmd->add_option("--topk", o->sizes.topk, "Entries to select")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  cmd->callback([o, blocks, &outcome] { outcome.code = run_select(*o, *blocks); });
}

void add_locate(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = app.add_subcommand("locate", "Logical ids to slots through a random block table");
  cmd->footer("Examples:\n  winnow locate --batch 64 --topk 2048\n  winnow locate --page 3 --json");
  auto o = std::make_shared<VerbOptions>();
  add_common(*cmd, *o, Over::kPages);
  cmd->add_option("--topk", o->sizes.topk, "Entries of each token")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  cmd->callback([o, &outcome] { outcome.code = run_locate(*o); });
}

}  // namespace winnow::cli
