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

// What the build has, whatever machine prints it: stages across, kernels down.
std::string as_markdown() {
  std::vector<std::string> stages, kernels;
  const auto once = [](std::vector<std::string>& list, const std::string& name) {
    if (std::find(list.begin(), list.end(), name) == list.end()) list.push_back(name);
  };
  for (const KernelInfo& k : winnow::support())
    once(stages, k.stage), once(kernels, k.device + " " + k.kernel);
  std::vector<std::string> header = {"kernel"};
  header.insert(header.end(), stages.begin(), stages.end());
  tools::Table table(header);
  for (const std::string& kernel : kernels) {
    std::vector<std::string> row = {kernel};
    for (const std::string& stage : stages) {
      bool has = false;
      for (const KernelInfo& k : winnow::support())
        has |= k.stage == stage && k.device + " " + k.kernel == kernel;
      row.push_back(has ? "✓" : "");
    }
    table.add(std::move(row));
  }
  return table.markdown();
}

}  // namespace

void add_support(CLI::App& app, Outcome&) {
  CLI::App* cmd =
      app.add_subcommand("support", "Which kernels this build has and this machine runs");
  cmd->footer("Examples:\n  winnow support\n  winnow support --json\n  winnow support --markdown");
  auto json = std::make_shared<bool>(false), markdown = std::make_shared<bool>(false);
  cmd->add_flag("--json", *json, "Print JSON")
      ->excludes(
          cmd->add_flag("--markdown", *markdown, "Print the stage x kernel table of the README"));
  cmd->callback([json, markdown] {
    if (*json) fmt::print("{}", as_json());
    else if (*markdown) fmt::print("{}", as_markdown());
    else fmt::print("{}, {} threads\n\n{}", cpu_name(), threads(), as_table().text());
  });
}

}  // namespace winnow::cli
