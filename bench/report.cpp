#include "report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "table.h"
#include "winnow/error.h"

namespace winnow::bench {

namespace {

using json = nlohmann::ordered_json;

json number(int64_t n) { return n == 0 ? json() : json(n); }
json number(double x) { return x > 0 ? json(x) : json(); }
json word(const std::string& s) { return s.empty() ? json() : json(s); }

// Four significant digits: more would be noise in a stored file.
double rounded(double x) { return std::stod(fmt::format("{:.4g}", x)); }

json object_of(const Result& r) {
  const double seconds = 1e-6 * r.us;
  return {{"stage", r.stage},
          {"case", r.of.name},
          {"kernel", r.of.kernel},
          {"device", r.device},
          {"model", word(r.of.model)},
          {"heads", number(r.of.heads)},
          {"topk", number(r.of.topk)},
          {"extra", number(r.of.extra)},
          {"batch", number(r.of.batch)},
          {"s_q", number(r.of.s_q)},
          {"context", number(r.of.context)},
          {"us", rounded(r.us)},
          {"tflops", number(rounded(r.of.flops / seconds * 1e-12))},
          {"gbps", number(rounded(r.of.bytes / seconds * 1e-9))},
          {"roof_tflops", number(rounded(r.roof * 1e-12))},
          {"roof_share", number(rounded(r.roof_share))},
          {"copy_us", number(rounded(r.copy_us))},
          {"peer", word(r.peer)},
          {"peer_us", number(r.peer_us)},
          {"ratio", number(r.peer_us > 0 ? rounded(r.peer_us / r.us) : 0.0)}};
}

json array_of(const std::vector<Result>& results) {
  json array = json::array();
  for (const Result& r : results) array.push_back(object_of(r));
  return array;
}

std::string cell(const json& value, const char* format) {
  return value.is_number() ? fmt::format(fmt::runtime(format), value.get<double>()) : "";
}

json roofs_of(const Roofs& r) {
  return {{"fma_gflops", number(rounded(r.fma * 1e-9))},
          {"bf16_dot_gflops", number(rounded(r.bf16_dot * 1e-9))},
          {"amx_gflops", number(rounded(r.amx * 1e-9))},
          {"tensor_gflops", number(rounded(r.tensor * 1e-9))},
          {"read_gbps", number(rounded(r.read * 1e-9))},
          {"copy_gbps", number(rounded(r.copy * 1e-9))}};
}

json header_of(const Machine& m, const Roofs& roofs) {
  return {{"cpu", m.cpu},           {"cores", m.cores},         {"threads", m.threads},
          {"gpu", word(m.gpu)},     {"driver", word(m.driver)}, {"commit", m.commit},
          {"version", m.version},   {"date", m.date},           {"load", m.load},
          {"compiler", m.compiler}, {"roofs", roofs_of(roofs)}};
}

// What of a header is there, a line each.
std::vector<std::string> header_lines(const json& h) {
  std::vector<std::string> lines;
  lines.push_back(fmt::format("{}, {} cores, {} threads", h.at("cpu").get<std::string>(),
                              h.at("cores").get<int>(), h.at("threads").get<int>()));
  if (h.at("gpu").is_string())
    lines.push_back(fmt::format("{}, driver {}", h["gpu"].get<std::string>(),
                                h["driver"].is_string() ? h["driver"].get<std::string>() : "?"));
  lines.push_back(fmt::format("winnow {} at {}, {}, {}, load {}",
                              h.at("version").get<std::string>(), h.at("commit").get<std::string>(),
                              h.at("compiler").get<std::string>(), h.at("date").get<std::string>(),
                              h.at("load").get<std::string>()));
  std::string roofs;
  const std::pair<const char*, const char*> units[] = {
      {"fma_gflops", "FMA {:.0f} GFLOP/s"}, {"bf16_dot_gflops", "bf16 dot {:.0f} GFLOP/s"},
      {"amx_gflops", "AMX {:.0f} GFLOP/s"}, {"tensor_gflops", "tensor {:.0f} GFLOP/s"},
      {"read_gbps", "read {:.1f} GB/s"},    {"copy_gbps", "copy {:.1f} GB/s"}};
  for (const auto& [key, format] : units)
    if (h.at("roofs").contains(key) && h["roofs"][key].is_number())
      roofs += (roofs.empty() ? "roofs: " : ", ") + cell(h["roofs"][key], format);
  lines.push_back(roofs);
  if (h.contains("note")) lines.push_back(h["note"].get<std::string>());  // written by hand
  return lines;
}

// Whether something else ran beside a row of the CPU. Its time is then too long, or, where it was
// the roof's turn, beyond the roof. (A GPU's rows may be: what L2 holds is read faster than
// memory.)
bool under_load(const json& header, const json& r) {
  if (r.at("device") != "cpu") return false;
  if (r.at("roof_share").is_number() && r["roof_share"].get<double>() > 1) return true;
  const double load = std::strtod(header.at("load").get<std::string>().c_str(), nullptr);
  return load > 0.25 * header.at("cores").get<int>();  // of one minute
}

const std::vector<std::string> kColumns = {"stage",      "case",           "kernel", ">µs",
                                           ">TFLOP/s",   ">GB/s",          ">roof",  "stored peer",
                                           ">stored µs", ">stored / here", "note"};
constexpr int kCopyColumn = 7;  // behind the roof

bool has_copy(const json& r) { return r.contains("copy_us") && r["copy_us"].is_number(); }

// `copies`: some row has the time of a copy.
std::vector<std::string> row_of(const json& header, const json& r, bool copies) {
  const auto text = [&](const char* key) {
    return r.at(key).is_string() ? r[key].get<std::string>() : "";
  };
  std::vector<std::string> row = {text("stage"),
                                  text("case"),
                                  text("kernel"),
                                  cell(r.at("us"), "{:.1f}"),
                                  cell(r.at("tflops"), "{:.3f}"),
                                  cell(r.at("gbps"), "{:.1f}"),
                                  r.at("roof_share").is_number()
                                      ? fmt::format("{:.0f} %", 100 * r["roof_share"].get<double>())
                                      : "",
                                  text("peer"),
                                  cell(r.at("peer_us"), "{:.1f}"),
                                  cell(r.at("ratio"), "{:.2f}×"),
                                  under_load(header, r) ? "under load" : ""};
  if (!copies) return row;
  std::vector<std::string> copy(2);
  if (has_copy(r)) {
    const double us = r["copy_us"].get<double>();
    copy = {fmt::format("{:.1f}", us),
            fmt::format("{:.0f} %", 100 * us / r.at("us").get<double>())};
  }
  row.insert(row.begin() + kCopyColumn, copy.begin(), copy.end());
  return row;
}

std::vector<std::string> columns_of(bool copies) {
  std::vector<std::string> columns = kColumns;
  if (copies) columns.insert(columns.begin() + kCopyColumn, {">copy µs", ">of the copy"});
  return columns;
}

bool any_copies(const json& results) {
  return std::any_of(results.begin(), results.end(), has_copy);
}

// What the columns leave open, a line each.
std::vector<std::string> notes_of(const json& header, const json& results) {
  bool peers = false, load = false;
  const bool copies = any_copies(results);
  for (const json& r : results) {
    peers |= r.at("peer").is_string();
    load |= under_load(header, r);
  }
  std::vector<std::string> notes;
  if (copies)
    notes.push_back(
        "copy: a plain copy that reads and writes as many bytes in all, timed beside the case by "
        "the "
        "same method; of the copy: its time divided by the case's");
  if (peers)
    notes.push_back(
        "stored: a peer's time from bench/peers, measured earlier on a machine of this kind, not "
        "in this run; stored / here divides it by this run's time");
  if (load)
    notes.push_back(
        "under load: the roof share is above 100 %, or the load average before the run above a "
        "quarter of the cores; measure such rows again on an idle machine");
  return notes;
}

}  // namespace

std::string header_text(const Machine& machine, const Roofs& roofs) {
  std::string out;
  for (const std::string& line : header_lines(header_of(machine, roofs))) out += line + "\n";
  return out;
}

std::string table_text(const Machine& machine, const std::vector<Result>& results) {
  const json header = header_of(machine, {});
  const json rows = array_of(results);
  const bool copies = any_copies(rows);
  std::vector<std::string> columns = columns_of(copies);
  columns.insert(columns.begin() + 4, {">median", ">spread"});
  tools::Table table(columns);
  for (const Result& r : results) {
    std::vector<std::string> row = row_of(header, object_of(r), copies);
    row.insert(row.begin() + 4,
               {fmt::format("{:.1f}", r.median), fmt::format("{:.0f} %", 100 * r.spread)});
    table.add(std::move(row));
  }
  std::string out = table.text();
  for (const std::string& note : notes_of(header, rows)) out += "\n" + note + "\n";
  return out;
}

std::string json_text(const std::vector<Result>& results) {
  return array_of(results).dump(1) + "\n";
}

std::string stored_text(const Machine& machine, const Roofs& roofs,
                        const std::vector<Result>& results) {
  return json{{"header", header_of(machine, roofs)}, {"results", array_of(results)}}.dump(1) + "\n";
}

std::string markdown_of(const std::string& stored, const std::string& file_name) {
  try {
    const json file = json::parse(stored);
    if (file.at("header").contains("peers"))
      throw Error(ErrorCode::kInvalidArgument,
                  "bench: " + file_name +
                      ": has ratios of libraries timed in turns, not a run of this program: "
                      "tools/plot_readme.py makes README's plot and tables of them");
    std::string out;
    for (const std::string& line : header_lines(file.at("header"))) out += "* " + line + "\n";
    const bool copies = any_copies(file.at("results"));
    tools::Table table(columns_of(copies));
    for (const json& r : file.at("results")) table.add(row_of(file.at("header"), r, copies));
    out += '\n';
    out += table.markdown();
    for (const std::string& note : notes_of(file.at("header"), file.at("results")))
      out += "\n" + note + "\n";
    return out;
  } catch (const json::exception& e) {
    throw Error(ErrorCode::kInvalidArgument,
                "bench: " + file_name + ": not a stored result: " + e.what());
  }
}

}  // namespace winnow::bench
