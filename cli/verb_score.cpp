// winnow score: indexer logits over random keys.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "score_bar.h"
#include "verb.h"

namespace winnow::cli {

namespace {

// The first and the last token against the reference, at some 2,000 keys each: the bound costs as
// much as the logit.
void check_score(Trial& trial, const bench::ScoreProblem& p) {
  const int64_t tokens = p.args.q.shape[0], keys = p.args.logits.shape[1];
  tools::Buffer<float> want(keys);
  double worst = 0, largest = 0;
  for (const int64_t t : {int64_t{0}, tokens - 1}) {
    ScoreArgs a = p.args;
    a.q.data = static_cast<std::byte*>(a.q.data) + t * a.q.stride[0] * size_of(a.q.dtype);
    a.q.shape[0] = 1;
    a.weights = tensor(p.weights.data() + t * a.weights.stride[0], {1, a.q.shape[1]});
    a.requests = tensor(p.paging.requests.data() + t, {1});
    a.ends = tensor(p.ends.data() + t, {1});
    a.logits = tensor(want.data(), {1, keys});
    a.target.kernel = "reference";
    score(a);
    const auto d = compare_scores(p.args, t, a.logits, std::max<int64_t>(keys / 2000, 1));
    trial.ok &= d.ok;
    worst = std::max(worst, d.worst);
    largest = std::max(largest, d.largest);
  }
  trial.deviation = fmt::format("{:.3f} of its bound (|Δ| {:.2g})", worst, largest);
}

int run_score(VerbOptions o, bool select_too) {
  resolve(o);
  o.sizes.topk = std::max<int64_t>(o.sizes.topk, 0);
  bench::ScoreProblem p(o.sizes);
  Trial trial{.stage = "score", .flops = p.flops(), .bytes = p.bytes()};
  trial.tensors = {{"q", p.args.q}, {"weights", p.args.weights}, {"keys", p.args.block_table}};
  trial.tensors[2].first = "block_table";
  trial.tensors.emplace_back(select_too ? "ids" : "logits",
                             select_too ? p.select_args.ids : p.args.logits);
  time_trial(trial, o, [&](const char* kernel) {
    p.args.target.kernel = p.select_args.score.target.kernel = kernel;
    if (select_too) score_select(p.select_args);
    else score(p.args);
  });
  trial.digest = digest(select_too ? std::as_bytes(p.ids.span()) : std::as_bytes(p.logits.span()));
  if (o.check) {
    p.args.target.kernel = trial.kernel.c_str();
    if (select_too) score(p.args);  // the same kernel gives the logits behind the ids
    check_score(trial, p);
  }
  return report(trial, o.json);
}

}  // namespace

void add_score(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = app.add_subcommand("score", "Indexer logits over random paged keys");
  cmd->footer(
      "Examples:\n  winnow score --context 131072\n"
      "  winnow score --select --topk 2048          straight to ids, no logits in memory\n"
      "  winnow score --bf16                        keys and queries in bf16 instead of e4m3\n"
      "  winnow score --index-heads 8 --s-q 4 --json");
  auto o = std::make_shared<VerbOptions>();
  auto select_too = std::make_shared<bool>(false);
  add_common(*cmd, *o, Over::kPages);
  cmd->add_option("--index-heads", o->sizes.index_heads, "Heads of the indexer")
      ->check(CLI::Range(kMinHeads, kMaxHeads))
      ->capture_default_str();
  cmd->add_option("--topk", o->sizes.topk, "Entries to select, with --select")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
  cmd->add_flag("--bf16", o->sizes.bf16_keys, "Index keys and queries in bf16");
  cmd->add_flag("--select", *select_too, "Select the top-k in the same call");
  cmd->callback([o, select_too, &outcome] { outcome.code = run_score(*o, *select_too); });
}

}  // namespace winnow::cli
