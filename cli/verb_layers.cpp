// winnow norm, rotate, prepare_query, index_query, prepare_queries, norm_write, compress: the steps
// between projections and attention, each alone, held against the reference.
#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "accuracy.h"
#include "layer_problems.h"
#include "verb.h"

namespace winnow::cli {

namespace {

// Kernels differ from the reference by fp32 sums in another order: a value next to a tie rounds to
// the other neighbour, one unit of bf16.
constexpr tools::Bar kOneUnit{0x1p-126, 0x1p-7 * 1.01};
// An e4m3 code follows such a value to its neighbour.
constexpr tools::Bar kOneCode{0x1p-9 * 1.01, 0x1p-3 * 1.01};

// Pooled values of both signs cancel: fp32 sums are 2^-21 off beside their terms, which are up to
// eight times the values' deviation, and the norm makes that 1.
constexpr tools::Bar kPooled{0x1p-18, 0x1p-7 * 1.01};

template <class Problem, class Verb>
int try_layer(Single trial, const VerbOptions& o, Problem& p, Verb&& verb) {
  trial.bytes = p.bytes();
  return try_out(trial, o, [&](const char* kernel) {
    p.args.target.kernel = kernel;
    verb(p.args);
  });
}

template <class Run>
void add(CLI::App& app, const char* verb, const char* what, Over over, Run run) {
  CLI::App* cmd = app.add_subcommand(verb, what);
  cmd->footer(
      fmt::format("Examples:\n  winnow {0} --batch 128\n"
                  "  winnow {0} --s-q 4096 --kernel reference --json",
                  verb));
  auto o = std::make_shared<VerbOptions>();
  o->sizes.batch = 16;
  o->sizes.context = 8192;
  add_common(*cmd, *o, over);
  run(cmd, o);
}

}  // namespace

void add_layer_verbs(CLI::App& app, Outcome& outcome) {
  add(app, "norm", "RMSNorm of random query and KV latents", Over::kTokens,
      [&](CLI::App* cmd, const auto& o) {
        cmd->callback([o, &outcome] {
          resolve(*o);
          bench::NormProblem p(o->sizes);
          outcome.code = try_layer({"norm", p.args.rows[0].out, kOneUnit}, *o, p, norm);
        });
      });
  add(app, "rotate", "RoPE of random heads, turned back", Over::kContext,
      [&](CLI::App* cmd, const auto& o) {
        add_heads(*cmd, *o);
        auto quantized = std::make_shared<bool>(false);
        cmd->add_flag("--e4m3", *quantized, "Codes and scales for an fp8 projection");
        cmd->callback([o, quantized, &outcome] {
          resolve(*o);
          bench::RotateProblem p(o->sizes, *quantized);
          const tools::Bar& bar = *quantized ? kOneCode : kOneUnit;
          outcome.code = try_layer({"rotate", p.args.out, bar}, *o, p, rotate);
        });
      });
  add(app, "prepare_query", "Norm and RoPE of random query heads", Over::kContext,
      [&](CLI::App* cmd, const auto& o) {
        add_heads(*cmd, *o);
        cmd->callback([o, &outcome] {
          resolve(*o);
          bench::PrepareQueryProblem p(o->sizes);
          const Single trial{
              .stage = "prepare_query", .out = p.args.out, .bar = kOneUnit, .turned = true};
          outcome.code = try_layer(trial, *o, p, prepare_query);
        });
      });
  add(app, "index_query", "RoPE and e4m3 of random index heads", Over::kContext,
      [&](CLI::App* cmd, const auto& o) {
        cmd->callback([o, &outcome] {
          resolve(*o);
          bench::IndexQueryProblem p(o->sizes);
          outcome.code = try_layer({"index_query", p.args.out, kOneCode}, *o, p, index_query);
        });
      });
  add(app, "prepare_queries", "V4's query and index heads in one call", Over::kContext,
      [&](CLI::App* cmd, const auto& o) {
        add_heads(*cmd, *o);
        cmd->callback([o, &outcome] {
          resolve(*o);
          bench::PrepareQueriesProblem p(o->sizes, false);
          const Single trial{
              .stage = "prepare_queries", .out = p.args.query.out, .bar = kOneUnit, .turned = true};
          outcome.code = try_layer(trial, *o, p, prepare_queries);
        });
      });
  add(app, "norm_write", "V3.2's norms and writes in one call", Over::kContext,
      [&](CLI::App* cmd, const auto& o) {
        cmd->callback([o, &outcome] {
          resolve(*o);
          bench::NormWriteProblem p(o->sizes, true);
          outcome.code =
              try_layer({"norm_write", p.args.norm.rows[0].out, kOneUnit}, *o, p, norm_write);
        });
      });
  add(app, "compress", "V4's compressor over random rows", Over::kPages,
      [&](CLI::App* cmd, const auto& o) {
        auto layer = std::make_shared<std::string>("c4a");
        std::vector<std::string> layers;
        for (const bench::Compressor& of : bench::kCompressors) layers.push_back(of.name);
        cmd->add_option("--layer", *layer, "The compressor")
            ->check(CLI::IsMember(layers))
            ->capture_default_str();
        cmd->callback([o, layer, &outcome] {
          resolve(*o);
          for (const bench::Compressor& of : bench::kCompressors) {
            if (of.name != *layer) continue;
            bench::CompressProblem p(o->sizes, of);
            tools::Buffer<bf16> latent(o->sizes.tokens() * of.width);
            p.args.latent = tensor(latent.data(), {o->sizes.tokens(), of.width});
            // A ring is written by every run, and read by the next: each starts from the same rows.
            const std::vector<float> state(p.state.span().begin(), p.state.span().end());
            const Single trial{.stage = "compress", .out = p.args.latent, .bar = kPooled};
            outcome.code = try_layer(trial, *o, p, [&](const CompressArgs& args) {
              std::copy(state.begin(), state.end(), p.state.span().begin());
              compress(args);
            });
          }
        });
      });
}

}  // namespace winnow::cli
