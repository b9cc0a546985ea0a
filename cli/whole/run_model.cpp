#include "whole/run_model.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "progress.h"
#include "table.h"
#include "whole/report.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::cli::whole {

namespace {

// Which row of the caches a request has while it is there.
class Rows {
 public:
  explicit Rows(int32_t count) {
    for (int32_t i = count - 1; i >= 0; --i) free_.push_back(i);
  }
  int32_t of(const Request* request) {
    const auto found = rows_.find(request);
    if (found != rows_.end()) return found->second;
    const int32_t row = free_.back();
    free_.pop_back();
    return rows_[request] = row;
  }
  void leave(const Request* request) {
    free_.push_back(of(request));
    rows_.erase(request);
  }

 private:
  std::map<const Request*, int32_t> rows_;
  std::vector<int32_t> free_;
};

struct Counts {
  int64_t tokens = 0, decoded = 0, arrived = 0, finished = 0, checked = 0;
};

std::vector<std::string> kinds(const RunModelOptions& o) {
  if (o.layers == 0) return excerpt_of(o.model);
  std::vector<std::string> all = schedule_of(o.model);
  if (static_cast<size_t>(o.layers) > all.size())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("run: --layers: expected at most the {} of {}, found {}", all.size(),
                            o.model, o.layers));
  all.resize(static_cast<size_t>(o.layers));
  return all;
}

// Prefixes in chunks that a step can hold.
void fill(Stack& stack, int32_t row, int32_t length, int64_t most) {
  for (int32_t at = 0; at < length;) {
    const auto count = static_cast<int32_t>(std::min<int64_t>(length - at, most));
    Batch batch;
    batch.add(row, at, count);
    stack.fill(batch);
    at += count;
  }
}

Counts run_steps(const RunModelOptions& o, Stack& stack) {
  Requests requests(o.limits, o.seed);
  Rows rows(o.limits.requests);
  Counts n;
  tools::Progress progress;
  for (int64_t s = 0; s < o.steps; ++s) {
    const Step& step = requests.next();
    for (const Request* r : step.arrived) {
      progress.at(
          fmt::format("step {}/{}  a request of {} tokens arrives", s + 1, o.steps, r->length));
      fill(stack, rows.of(r), r->length, o.limits.step_tokens);
    }
    Batch batch;
    for (size_t i = 0; i < step.requests.size(); ++i) {
      const int32_t count = step.query_starts[i + 1] - step.query_starts[i];
      batch.add(rows.of(step.requests[i]), step.seq_lens[i] - count, count);
    }
    progress.at(fmt::format("step {}/{}  {} tokens through {} layers", s + 1, o.steps,
                            batch.tokens(), stack.size()));
    stack.run(batch);
    if (o.check || s + 1 == o.steps) {
      stack.check();
      ++n.checked;
    }
    n.tokens += step.tokens();
    n.decoded += step.decodes;
    n.arrived += static_cast<int64_t>(step.arrived.size());
    for (size_t i = 0; i < step.requests.size(); ++i)
      if (step.seq_lens[i] >= step.requests[i]->last) rows.leave(step.requests[i]);
    requests.done();
    n.finished += step.finished;
  }
  return n;
}

// The worst of all steps, as a share of its bound.
double worst_of(const Checks& checks) {
  double worst = 0;
  for (const Check& c : checks)
    if (c.compared > 0) worst = std::max(worst, c.deviation / c.bound);
  return worst;
}

double seconds_of(const Totals& totals, std::initializer_list<Timed> stages) {
  double sum = 0;
  for (const Timed stage : stages) sum += totals[stage].seconds;
  return sum;
}

std::string layer_table(Stack& stack, int64_t steps) {
  tools::Table table({"layer", "kind", ">projections", ">norm to queries", ">choose", ">attend",
                      ">ms/step", ">B/token", "worst deviation from fp64"});
  for (int64_t i = 0; i < stack.size(); ++i) {
    const Layer& layer = stack.layer(i);
    const Totals& t = layer.totals();
    const auto ms = [&](std::initializer_list<Timed> stages) {
      return fmt::format("{:.3f}", 1e3 * seconds_of(t, stages) / static_cast<double>(steps));
    };
    std::string failed;
    for (size_t s = 0; s < kTimed; ++s)
      if (const Check& c = stack.checks(i)[s]; !c.ok && failed.empty())
        failed = fmt::format("FAILED: {}: {}", kTimedNames[s], c.note);
    table.add(
        {std::to_string(i), layer.spec().kind, ms({kProjectInput, kProjectQuery, kProjectOutput}),
         ms({kWrite, kCompress, kPrepare, kRotate}), ms({kChoose}), ms({kAttend}),
         ms({kProjectInput, kProjectQuery, kProjectOutput, kWrite, kCompress, kPrepare, kRotate,
             kChoose, kAttend}),
         fmt::format("{:.0f}", layer.bytes_per_token()),
         failed.empty() ? fmt::format("{:.3f} of its bound", worst_of(stack.checks(i))) : failed});
  }
  return table.text();
}

}  // namespace

int run_model(const RunModelOptions& o) {
  std::vector<Spec> specs;
  for (const std::string& kind : kinds(o)) specs.push_back(spec_of(o.model, kind));
  const Capacity capacity{.requests = o.limits.requests,
                          .tokens = o.limits.step_tokens,
                          .context = o.limits.context + 1,
                          .page = o.limits.page,
                          .bf16_caches = o.cache == "bf16",
                          .kernel = o.kernel};
  Stack stack(specs, capacity, {.seed = o.seed, .cuda = o.device == "cuda"});
  const Counts n = run_steps(o, stack);
  const bool ok = stack.ok();
  if (o.json) {
    using json = nlohmann::ordered_json;
    json layers = json::array();
    for (int64_t i = 0; i < stack.size(); ++i)
      layers.push_back(
          {{"kind", stack.layer(i).spec().kind},
           {"cache_bytes_per_token", stack.layer(i).bytes_per_token()},
           {"stages", json_of(stack.layer(i), stack.layer(i).totals(), stack.checks(i))}});
    fmt::print("{}\n", json{{"model", o.model},
                            {"requests", o.limits.requests},
                            {"context", o.limits.context},
                            {"steps", o.steps},
                            {"tokens", n.tokens},
                            {"decoded", n.decoded},
                            {"arrived", n.arrived},
                            {"finished", n.finished},
                            {"checked_steps", n.checked},
                            {"layers", layers},
                            {"ok", ok}}
                           .dump(1));
    return ok ? 0 : 1;
  }
  const Spec& first = specs.front();
  fmt::print("{}: hidden {}, {} heads, {} of {} layers, {} caches, page {}, {} workers\n", o.model,
             first.hidden, first.heads, specs.size(), schedule_of(o.model).size(), o.cache,
             o.limits.page, threads());
  fmt::print(
      "{} tokens in {} steps ({} decoded, {} prefilled); {} requests arrived, {} finished\n\n",
      n.tokens, o.steps, n.decoded, n.tokens - n.decoded, n.arrived, n.finished);
  fmt::print("{}", layer_table(stack, o.steps));
  if (ok)
    fmt::print("\nevery layer within its bounds of the layer in fp64; {} step{} checked\n",
               n.checked, n.checked == 1 ? "" : "s");
  else fmt::print("\ncheck FAILED\n");
  return ok ? 0 : 1;
}

}  // namespace winnow::cli::whole
