// winnow attend: decode attention over random records.
#include <fmt/format.h>

#include <memory>

#include "accuracy.h"
#include "verb.h"

namespace winnow::cli {

namespace {

// The reference works at a few hundred MFLOP/s: it is given the first tokens that it can do in a
// few seconds.
int64_t tokens_to_check(const bench::AttendProblem& p) {
  const double each = p.flops() / static_cast<double>(p.args.q.shape[0]);
  return std::clamp<int64_t>(static_cast<int64_t>(2e9 / each), 1, p.args.q.shape[0]);
}

Tensor front(Tensor t, int64_t rows) {
  t.shape[0] = rows;
  return t;
}

void check_attend(Trial& trial, const bench::AttendProblem& p) {
  const int64_t n = tokens_to_check(p);
  const int64_t heads = p.args.q.shape[1], d_v = p.args.out.shape[2];
  tools::Buffer<bf16> out(n * heads * d_v);
  tools::Buffer<float> lse(n * heads), max_logit(n * heads);
  AttendArgs a = p.args;
  a.target.kernel = "reference";
  a.workspace = {};
  a.q = front(a.q, n);
  for (KvList& list : a.lists)
    if (list.indices) list.indices = front(list.indices, n);
  a.out = tensor(out.data(), {n, heads, d_v});
  a.lse = tensor(lse.data(), {n, heads});
  a.max_logit = tensor(max_logit.data(), {n, heads});
  attend(a);
  // The reference rounds to e4m3 as kernels do, and a logit's last bits decide about a weight's
  // code.
  const bool fp8 = a.precision == Precision::kFp8;
  constexpr tools::Bar kFp8Out{0.02, 0.25, 1e-3}, kFp8Lse{1e-3, 1e-3};
  const tools::Bar& lse_bar = fp8 ? kFp8Lse : tools::kDecodeLse;
  const auto o = tools::compare(front(p.args.out, n), a.out, fp8 ? kFp8Out : tools::kDecodeOut);
  const auto l = tools::compare(front(p.args.lse, n), a.lse, lse_bar);
  const auto m = tools::compare(front(p.args.max_logit, n), a.max_logit, lse_bar);
  trial.ok = o.ok && l.ok && m.ok;
  trial.deviation = fmt::format(
      "out {:.3f} of its bound (|Δ| {:.2g}, cosine {:.2g}), lse {:.3f}, max logit {:.3f}; {} of {} "
      "tokens",
      o.worst, o.largest, o.cosine, l.worst, m.worst, n, p.args.q.shape[0]);
}

int run_attend(VerbOptions o, bool topk_given, Precision precision) {
  resolve(o);
  const Model& model = o.sizes.model;
  if (!topk_given) o.sizes.topk = model.lists == 2 ? model.window : model.default_topk;
  if (model.lists == 1 && o.sizes.extra > 0)
    throw CLI::ValidationError("--extra", "v32 has one list; use --topk");
  if (model.lists == 2 && o.sizes.extra < 0) o.sizes.extra = model.default_topk;
  o.sizes.extra = std::max<int64_t>(o.sizes.extra, 0);
  bench::AttendProblem p(o.sizes);
  p.args.precision = precision;
  Trial trial{.stage = "attend", .flops = p.flops(), .bytes = p.bytes()};
  trial.tensors = {{"q", p.args.q}, {"slots", p.args.lists[0].indices}};
  if (o.sizes.extra > 0) trial.tensors.emplace_back("extra slots", p.args.lists[1].indices);
  trial.tensors.insert(trial.tensors.end(), {{"out", p.args.out}, {"lse", p.args.lse}});
  p.use(o.kernel.empty() ? nullptr : o.kernel.c_str());
  time_trial(trial, o, [&](const char*) { attend(p.args); });
  trial.digest = digest(std::as_bytes(p.out.span()));
  if (o.check) check_attend(trial, p);
  return report(trial, o.json);
}

}  // namespace

void add_attend(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd = app.add_subcommand("attend", "Attention over selected records of a random cache");
  cmd->footer(
      "Examples:\n  winnow attend --heads 128 --batch 4\n"
      "  winnow attend --model v4 --heads 64 --extra 1024 --json\n"
      "  winnow attend --cache bf16 --kernel reference --context 4096\n"
      "  winnow attend --precision fp8 --kernel reference --context 4096");
  auto o = std::make_shared<VerbOptions>();
  auto cache = std::make_shared<std::string>("fp8");
  auto precision = std::make_shared<std::string>("full");
  o->sizes.extra = -1;  // not given
  add_common(*cmd, *o, Over::kPages);
  add_model(*cmd, *o);
  add_heads(*cmd, *o);
  CLI::Option* topk =
      cmd->add_option("--topk", o->sizes.topk, "Width of the list (v32: 2048, v4: the window, 128)")
          ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  cmd->add_option("--extra", o->sizes.extra, "v4: width of the compressed list (512)")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 24));
  cmd->add_option("--cache", *cache, "Records")
      ->check(CLI::IsMember({"fp8", "bf16"}))
      ->capture_default_str();
  cmd->add_option("--precision", *precision, "fp8: queries and weights are rounded to e4m3")
      ->check(CLI::IsMember({"full", "fp8"}))
      ->capture_default_str();
  cmd->callback([o, cache, precision, topk, &outcome] {
    o->sizes.bf16_cache = *cache == "bf16";
    outcome.code =
        run_attend(*o, topk->count() > 0, *precision == "fp8" ? Precision::kFp8 : Precision::kFull);
  });
}

}  // namespace winnow::cli
