// score_select: the ids that score() and select() of the references give, bit for bit.
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
  select({.logits = scored.logits,
          .starts = p.args.starts,
          .ends = p.args.ends,
          .ids = tensor(want.data(), {p.T, K}),
          .relative = relative,
          .target = {.kernel = "reference"}});
  for (const Candidate& kernel : candidates("score_select")) {
    if (!serves(kernel, p.args)) continue;
    ids.poison();
    ScoreSelectArgs a{.score = p.args, .ids = tensor(ids.data(), {p.T, K}), .relative = relative};
    a.score.target = kernel.target();
    const DeviceWorkspace workspace(a.score.target.device, score_select_workspace_bytes(a));
    if (kernel.cuda || chance(s, 50))
      a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
    score_select(a);
    finish(kernel);
    EXPECT_EQ(ids.values(), want.values()) << kernel.name;
  }
}

const FuzzTarget score_select_target{"score_select", 2, run};

}  // namespace
}  // namespace winnow::testing
