// winnow support: stage x kernel, each available or the reason why not.
#include <fmt/format.h>

#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "table.h"
#include "winnow/support.h"

namespace winnow::cli {

namespace {

std::string as_json() {
  nlohmann::ordered_json kernels = nlohmann::ordered_json::array();
  for (const KernelInfo& k : winnow::support())
    kernels.push_back(
        {{"stage", k.stage},
         {"kernel", k.kernel},
         {"device", k.device},
         {"available", k.available},
         {"reason", k.available ? nlohmann::ordered_json() : nlohmann::ordered_json(k.reason)}});
  return nlohmann::ordered_json{{"version", version()},
                                {"cpu", cpu_name()},
                                {"threads", threads()},
                                {"kernels", kernels}}
             .dump(1) +
         "\n";
}

tools::Table as_table() {
  tools::Table table({"stage", "kernel", "device", "here"});
  for (const KernelInfo& k : winnow::support())
    table.add({k.stage, k.kernel, k.device, k.available ? "available" : "no: " + k.reason});
  return table;
}

// What the build has, whatever machine prints it: a row per stage, its kernels in the order of
// trying.
std::string as_markdown() {
  std::vector<std::vector<std::string>> rows;
  for (const KernelInfo& k : winnow::support()) {
    if (k.stage == kEveryStage) continue;
    if (rows.empty() || rows.back()[0] != k.stage) rows.push_back({k.stage, ""});
    std::string& kernels = rows.back()[1];
    kernels += (kernels.empty() ? "" : ", ") + k.kernel + (k.device == "cpu" ? "" : " (CUDA)");
  }
  tools::Table table({"stage", "kernels, fastest first"});
  for (std::vector<std::string>& row : rows) table.add(std::move(row));
  return table.markdown();
}

}  // namespace

void add_support(CLI::App& app, Outcome&) {
  CLI::App* cmd =
      app.add_subcommand("support", "Which kernels this build has and this machine runs");
  cmd->footer("Examples:\n  winnow support\n  winnow support --json\n  winnow support --markdown");
  auto json = std::make_shared<bool>(false), markdown = std::make_shared<bool>(false);
  cmd->add_flag("--json", *json, "Print JSON")
      ->excludes(cmd->add_flag("--markdown", *markdown, "Print the table of the README"));
  cmd->callback([json, markdown] {
    if (*json) fmt::print("{}", as_json());
    else if (*markdown) fmt::print("{}", as_markdown());
    else fmt::print("{}, {} threads\n\n{}", cpu_name(), threads(), as_table().text());
  });
}

}  // namespace winnow::cli
