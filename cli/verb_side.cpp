// winnow mha, merge, mask, lists, absorb: the verbs beside the flow, each alone, held against the
// reference.
#include <fmt/format.h>

#include <memory>

#include "side_problems.h"
#include "verb.h"

namespace winnow::cli {

namespace {

CLI::App* add_verb(CLI::App& app, const char* verb, const char* what, const char* example) {
  CLI::App* cmd = app.add_subcommand(verb, what);
  cmd->footer(
      fmt::format("Examples:\n  winnow {0} {1}\n"
                  "  winnow {0} --kernel reference --json",
                  verb, example));
  return cmd;
}

void add_topk(CLI::App* cmd, VerbOptions& o, const char* what) {
  cmd->add_option("--topk", o.sizes.topk, what)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
      ->capture_default_str();
}

void add_mha(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = add_verb(app, "mha", "Causal attention over random keys and values of each head",
                           "--heads 16 --s-q 128 --context 1024 --topk 256");
  auto o = std::make_shared<VerbOptions>();
  o->sizes.heads = 2;
  o->sizes.s_q = o->sizes.context = 256;
  o->sizes.topk = 0;
  add_common(*cmd, *o, Over::kContext);
  add_heads(*cmd, *o);
  add_topk(cmd, *o, "Keys of each token (0: all that it may see)");
  cmd->callback([o, &outcome] {
    resolve(*o);
    bench::MhaProblem p(o->sizes);
    outcome.code = try_out({.stage = "mha",
                            .out = p.args.out,
                            .bar = tools::kPrefillOut,
                            .flops = p.flops(),
                            .bytes = p.bytes()},
                           *o, [&](const char* kernel) {
                             p.args.target.kernel = kernel;
                             attend_mha(p.args);
                           });
  });
}

void add_merge(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = add_verb(app, "merge", "Random results of parts of the keys into one",
                           "--batch 64 --heads 128 --parts 4");
  auto o = std::make_shared<VerbOptions>();
  auto parts = std::make_shared<int64_t>(2);
  o->sizes.batch = 16;
  add_common(*cmd, *o, Over::kTokens);
  add_heads(*cmd, *o);
  cmd->add_option("--parts", *parts, "Partial results of each token")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 10))
      ->capture_default_str();
  cmd->callback([o, parts, &outcome] {
    resolve(*o);
    bench::MergeProblem p(o->sizes, *parts);
    // fp32 sums in another order: a value next to a tie rounds to the other neighbour, one unit of
    // bf16, and sums of both signs keep the fp32 error of their terms.
    constexpr tools::Bar kBar{0x1p-20, 0x1p-7 * 1.01};
    outcome.code = try_out({.stage = "merge", .out = p.args.out, .bar = kBar, .bytes = p.bytes()},
                           *o, [&](const char* kernel) {
                             p.args.target.kernel = kernel;
                             merge(p.args);
                           });
  });
}

void add_mask(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = add_verb(app, "mask", "Random top-k ids as bits", "--s-q 512 --context 131072");
  auto o = std::make_shared<VerbOptions>();
  o->sizes.batch = 16;
  add_common(*cmd, *o, Over::kContext);
  add_topk(cmd, *o, "Ids of each token");
  cmd->callback([o, &outcome] {
    resolve(*o);
    bench::MaskProblem p(o->sizes);
    outcome.code = try_out({.stage = "mask", .out = p.args.mask, .bytes = p.bytes()}, *o,
                           [&](const char* kernel) {
                             p.args.target.kernel = kernel;
                             topk_mask(p.args);
                           });
  });
}

void add_lists(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = add_verb(app, "lists", "V4's index lists over a random block table",
                           "--kind combined --s-q 512 --context 8192");
  auto o = std::make_shared<VerbOptions>();
  auto kind = std::make_shared<std::string>("window");
  o->sizes.batch = 16;
  add_common(*cmd, *o, Over::kPages);
  cmd->add_option("--kind", *kind, "Which lists")
      ->check(CLI::IsMember(
          std::vector<std::string>(bench::kListKinds.begin(), bench::kListKinds.end())))
      ->capture_default_str();
  cmd->callback([o, kind, &outcome] {
    resolve(*o);
    bench::ListsProblem p(o->sizes, *kind);
    outcome.code = try_out({.stage = "lists", .out = p.out, .bytes = p.bytes()}, *o,
                           [&](const char* kernel) { p.run(kernel); });
  });
}

void add_absorb(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      add_verb(app, "absorb", "Random queries into the latent space, or outputs out of it",
               "--output --batch 64 --heads 128");
  auto o = std::make_shared<VerbOptions>();
  auto output = std::make_shared<bool>(false);
  o->sizes.batch = 16;
  add_common(*cmd, *o, Over::kTokens);
  add_heads(*cmd, *o);
  cmd->add_flag("--output", *output, "project_output() instead of absorb_query()");
  cmd->callback([o, output, &outcome] {
    resolve(*o);
    bench::AbsorbProblem p(o->sizes);
    // fp32 sums of 128 or 512 products in another order, rounded once to bf16.
    constexpr tools::Bar kBar{0x1p-16, 0x1p-7 * 1.01};
    outcome.code = try_out({.stage = "absorb",
                            .out = *output ? p.output.out : p.query.out,
                            .bar = kBar,
                            .flops = p.flops(),
                            .bytes = p.bytes()},
                           *o, [&](const char* kernel) {
                             p.query.target.kernel = p.output.target.kernel = kernel;
                             if (*output) project_output(p.output);
                             else absorb_query(p.query);
                           });
  });
}

}  // namespace

void add_side_verbs(CLI::App& app, Outcome& outcome) {
  add_mha(app, outcome);
  add_merge(app, outcome);
  add_mask(app, outcome);
  add_lists(app, outcome);
  add_absorb(app, outcome);
}

}  // namespace winnow::cli
