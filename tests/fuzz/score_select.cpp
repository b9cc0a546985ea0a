// score_select: the ids, values and blocks that score() and select() of the references give, bit
// for bit.
#include "score_problem.h"
#include "winnow/select.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  ScoreProblem p(s);
  const int64_t K = draw(s, 0, 100), N = p.keys();
  const bool relative = chance(s, 50);
  Guarded<float> logits(p.T * N);
  ScoreArgs scored = p.args;
  scored.logits = tensor(logits.data(), {p.T, N});
  scored.target.kernel = "reference";
  score(scored);
  Guarded<int32_t> want(p.T * K), ids(p.T * K);
  // A device gives ids alone.
  const bool on_cpu = compared == Compared::kCpu;
  const bool with_values = on_cpu && chance(s, 30), with_blocks = on_cpu && chance(s, 30);
  const int64_t B = draw(s, 1, 9);
  Guarded<float> want_values(p.T * K), values(p.T * K);
  Guarded<int32_t> within = indices(s, p.T * B, 9), want_best(p.T * B), best(p.T * B);
  SelectArgs selected{.logits = scored.logits,
                      .starts = p.args.starts,
                      .ends = p.args.ends,
                      .ids = tensor(want.data(), {p.T, K}),
                      .relative = relative,
                      .target = {.kernel = "reference"}};
  if (with_values) selected.values = tensor(want_values.data(), {p.T, K});
  if (with_blocks)
    selected.blocks = {.size = draw32(s, 1, 6),
                       .within = tensor(within.data(), {p.T, B}),
                       .best = tensor(want_best.data(), {p.T, B})};
  select(selected);
  for (const Candidate& kernel : candidates("score_select")) {
    if (!serves(kernel, p.args)) continue;
    ids.poison();
    values.poison();
    best.poison();
    ScoreSelectArgs a{.score = p.args,
                      .ids = tensor(ids.data(), {p.T, K}),
                      .relative = relative,
                      .blocks = selected.blocks};
    if (with_values) a.values = tensor(values.data(), {p.T, K});
    if (with_blocks) a.blocks.best.data = best.data();
    a.score.target = kernel.target();
    const DeviceWorkspace workspace(a.score.target.device, score_select_workspace_bytes(a));
    if (kernel.cuda || chance(s, 50))
      a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
    score_select(a);
    finish(kernel);
    EXPECT_EQ(ids.values(), want.values()) << kernel.name;
    EXPECT_EQ(best.values(), want_best.values()) << kernel.name;
    expect_same(values, want_values.values(), "values of " + kernel.name);
  }
}

const FuzzTarget score_select_target{"score_select", 2, run};

}  // namespace
}  // namespace winnow::testing
