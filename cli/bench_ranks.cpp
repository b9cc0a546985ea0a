// winnow bench parallel: layers over 1 to 16 MPI ranks of this machine, one thread each, beside the
// model's prediction, and what the model says of ranks that are whole hosts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "machine.h"
#include "start_ranks.h"
#include "store.h"
#include "table.h"
#include "winnow/error.h"

namespace winnow::cli {

namespace {

using nlohmann::ordered_json;

// Milliseconds of one V3.2 layer, one token, with the context over hosts of 16 AMX cores: pieces
// measured on such a host (bench/results/cpu-emerald-rapids-16.md), 3 us and 40 GB/s between hosts.
double hosts_ms(double context, int32_t hosts) {
  constexpr double kTopk = 2048, kHeads = 128;
  constexpr double kScore32k = 205.9, kAttend2048 = 361.6, kAttend512 = 246.4;
  const double own = std::max(kTopk / hosts, 512.0);
  const double attend = kAttend512 + (kAttend2048 - kAttend512) * (own - 512) / (2048 - 512);
  double us = kScore32k * context / 32768 / hosts + attend;
  if (hosts > 1) {
    const double f = (hosts - 1.0) / hosts, hops = std::ceil(std::log2(hosts));
    const auto moved = [&](double bytes) { return 3.0 * hops + bytes / 40e3; };
    us += moved(kTopk * 8 * (hosts - 1)) + 30 + moved(kHeads * 1152 * f) +
          moved(kHeads * 2052 * f) + 20;
  }
  return us / 1e3;
}

tools::Table rows_table(const ordered_json& rows) {
  tools::Table table({"case", ">ranks", ">measured µs", ">predicted µs", ">measured/predicted",
                      ">speed-up", ">efficiency", ">collectives", ">bytes in"});
  std::map<std::string, double> first;  // one rank's time of a case
  for (const ordered_json& r : rows) {
    const auto number = [&](const char* name) { return r.at(name).get<double>(); };
    const std::string name = r.at("case").get<std::string>();
    const double measured = number("measured_us"), ranks = number("ranks");
    if (ranks == 1) first[name] = measured;
    const double speed = first.contains(name) ? first[name] / measured : 0;
    table.add({name, fmt::format("{:.0f}", ranks), fmt::format("{:.0f}", measured),
               fmt::format("{:.0f}", number("predicted_us")),
               fmt::format("{:.2f}", measured / number("predicted_us")),
               speed > 0 ? fmt::format("{:.2f}", speed) : "",
               speed > 0 ? fmt::format("{:.0f} %", 100 * speed / ranks) : "",
               fmt::format("{:.0f}", number("collectives")),
               fmt::format("{:.0f}", number("bytes_in"))});
  }
  return table;
}

tools::Table hosts_table() {
  tools::Table table({"context", ">1 host", ">2", ">4", ">8", ">16"});
  for (const int32_t k : {32, 128, 1024}) {
    std::vector<std::string> cells = {fmt::format("{}k", k)};
    const double one = hosts_ms(k * 1024.0, 1);
    for (const int32_t hosts : {1, 2, 4, 8, 16}) {
      const double ms = hosts_ms(k * 1024.0, hosts);
      cells.push_back(fmt::format("{:.2f} ({:.0f} %)", ms, 100 * one / ms / hosts));
    }
    table.add(cells);
  }
  return table;
}

constexpr const char* kPrediction =
    "predicted: the ranks' own work, timed side by side without a collective, and each collective "
    "by\n"
    "a table measured before (Open MPI 4.1.6, 16 cores). One thread a rank, 128 heads, top-k "
    "2048.\n";
constexpr const char* kHosts =
    "Prediction only: one token, context over hosts of 16 AMX cores, ms a layer (efficiency)\n";

}  // namespace

void bench_over_ranks(const RankedBench& b) {
  ordered_json rows = ordered_json::array();
  for (const int32_t ranks : b.ranks) {
    RankJob job{.ranks = ranks, .threads = 1, .words = {"bench"}};
    if (!b.filter.empty()) job.words.insert(job.words.end(), {"--filter", b.filter});
    if (!b.kernel.empty()) job.words.insert(job.words.end(), {"--kernel", b.kernel});
    job.words.insert(job.words.end(), {"--milliseconds", b.quick ? "30" : "400"});
    for (const std::string& line : start_ranks("bench parallel", job).lines)
      rows.push_back(ordered_json::parse(line));
  }
  if (rows.empty())
    throw Error(ErrorCode::kUnsupported, "bench: no case of parallel matches what was asked for");
  std::sort(rows.begin(), rows.end(), [](const ordered_json& x, const ordered_json& y) {
    return std::tie(x.at("case"), x.at("ranks")) < std::tie(y.at("case"), y.at("ranks"));
  });
  bench::Machine machine = bench::describe_machine();
  if (!b.commit.empty()) machine.commit = b.commit;
  const std::string header =
      fmt::format("{}, {} cores, winnow {} ({}), {}", machine.cpu, machine.cores, machine.version,
                  machine.commit, machine.date);
  fmt::print("{}\n\n{}\n{}\n{}{}", header, rows_table(rows).text(), kPrediction, kHosts,
             hosts_table().text());
  if (!b.json.empty()) store(b.json, rows.dump(1) + "\n");
  if (b.save.empty()) return;
  const ordered_json stored = {{"header",
                                {{"cpu", machine.cpu},
                                 {"cores", machine.cores},
                                 {"commit", machine.commit},
                                 {"date", machine.date},
                                 {"version", machine.version}}},
                               {"parallel", rows}};
  store(b.save, stored.dump(1) + "\n");
  const std::string page = std::filesystem::path(b.save).replace_extension(".md");
  store(page,
        fmt::format("# winnow bench parallel\n\n{}\n\n{}\n{}\n{}\n{}", header,
                    rows_table(rows).markdown(), kPrediction, kHosts, hosts_table().markdown()));
}

}  // namespace winnow::cli
