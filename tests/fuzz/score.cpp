// score: logits bit for bit, what lies outside the ranges included.
#include "score_problem.h"

namespace winnow::testing {
namespace {

void run(Source& s) {
  ScoreProblem p(s);
  Guarded<float> logits(p.T * p.N);
  ScoreArgs a = p.args;
  a.logits = tensor(logits.data(), {p.T, p.N});
  expect_exact("score", score, a, logits);
}

const FuzzTarget score_target{"score", 2, run};

}  // namespace
}  // namespace winnow::testing
