#include "peers.h"

#include <map>
#include <nlohmann/json.hpp>

#include "winnow/support.h"

namespace winnow::bench {

namespace {

using json = nlohmann::ordered_json;  // as in reports: compiled once

struct Figure {
  std::string peer;
  json fields;  // stage, model, heads, ...; `us` is taken out
  double us;
};

bool applies(const json& where, const std::string& device, const std::string& machine) {
  if (where.at("device") != device) return false;
  for (const json& word : where.value("contains", json::array()))
    if (machine.find(word.get<std::string>()) == std::string::npos) return false;
  for (const json& word : where.value("lacks", json::array()))
    if (machine.find(word.get<std::string>()) != std::string::npos) return false;
  return true;
}

// The figures that were measured on a machine like this one.
std::vector<Figure> figures_of(const std::string& device) {
  std::vector<Figure> out;
  const Backend* backend = find_backend(device);
  const std::string machine = backend ? backend->machine() : "";
  for (const auto& [name, text] : peer_files()) {
    const json file = json::parse(text);
    if (!applies(file.at("applies"), device, machine)) continue;
    for (const json& peer : file.at("peers")) {
      if (peer.contains("threads") && peer["threads"] != threads()) continue;
      for (json figure : peer.at("figures")) {
        const double us = figure.at("us").get<double>();
        figure.erase("us");
        out.push_back({peer.at("peer"), std::move(figure), us});
      }
    }
  }
  return out;
}

bool matches(const json& fields, const Result& r) {
  const json mine = {{"stage", r.stage},  {"model", r.of.model},    {"heads", r.of.heads},
                     {"topk", r.of.topk}, {"extra", r.of.extra},    {"batch", r.of.batch},
                     {"s_q", r.of.s_q},   {"context", r.of.context}};
  for (const auto& [key, value] : fields.items())
    if (!mine.contains(key) || mine[key] != value) return false;
  return true;
}

}  // namespace

bool measured_on(const std::string& file, const std::string& device, const std::string& machine) {
  return applies(json::parse(file).at("applies"), device, machine);
}

void find_peer(Result& result) {
  static std::map<std::string, std::vector<Figure>> known;  // by device, read once
  const auto [found, fresh] = known.try_emplace(result.device);
  if (fresh) found->second = figures_of(result.device);
  for (const Figure& f : found->second)
    if (matches(f.fields, result) && (result.peer.empty() || f.us < result.peer_us)) {
      result.peer = f.peer;
      result.peer_us = f.us;
    }
}

}  // namespace winnow::bench
