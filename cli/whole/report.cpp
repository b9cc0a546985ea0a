#include "whole/report.h"

#include <fmt/format.h>

#include "table.h"

namespace winnow::cli::whole {

namespace {

// "0.0120 of 0.070": of the last step that was compared, and its bound.
std::string deviation_of(const Check& c) {
  if (c.compared == 0) return "-";
  if (!c.ok) return "FAILED: " + c.note;
  return fmt::format("{:.4f} of {:.3f}", c.deviation, c.bound);
}

}  // namespace

std::string table_of(const Layer& layer, const Totals& totals, const Checks& checks, int64_t runs) {
  double all = 0;
  for (const Total& t : totals) all += t.seconds;
  tools::Table table({"stage", "kernel", ">ms/step", ">share", ">MB/step", ">GB/s", ">GFLOP/s",
                      "deviation from fp64"});
  const auto steps = static_cast<double>(runs);
  for (size_t i = 0; i < kTimed; ++i) {
    const Total& t = totals[i];
    if (t.calls == 0) continue;
    table.add({kTimedNames[i], layer.kernels()[i], fmt::format("{:.3f}", 1e3 * t.seconds / steps),
               fmt::format("{:.0f} %", 100 * t.seconds / all),
               fmt::format("{:.2f}", 1e-6 * t.bytes / steps),
               fmt::format("{:.1f}", 1e-9 * t.bytes / t.seconds),
               t.flops > 0 ? fmt::format("{:.0f}", 1e-9 * t.flops / t.seconds) : "",
               deviation_of(checks[i])});
  }
  table.add({"all", "", fmt::format("{:.3f}", 1e3 * all / steps), "100 %"});
  return table.text();
}

nlohmann::ordered_json json_of(const Layer& layer, const Totals& totals, const Checks& checks) {
  using json = nlohmann::ordered_json;
  json stages = json::array();
  for (size_t i = 0; i < kTimed; ++i) {
    const Total& t = totals[i];
    const Check& c = checks[i];
    if (t.calls == 0) continue;
    stages.push_back({{"stage", kTimedNames[i]},
                      {"kernel", layer.kernels()[i]},
                      {"seconds", t.seconds},
                      {"calls", t.calls},
                      {"bytes", t.bytes},
                      {"flops", t.flops},
                      {"compared", c.compared},
                      {"deviation", c.compared > 0 && c.ok ? json(c.deviation) : json()},
                      {"bound", c.compared > 0 ? json(c.bound) : json()},
                      {"ok", c.ok}});
  }
  return stages;
}

}  // namespace winnow::cli::whole
