// winnow verify: this machine's kernels against golden vectors.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>

#include "commands.h"
#include "core/kernel_table.h"
#include "golden.h"
#include "winnow/error.h"
#include "winnow/support.h"

namespace winnow::cli {

namespace {

namespace fs = std::filesystem;

// Files as given; folders as the safetensors files in them, by name.
std::vector<std::string> files_of(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code error;
    if (!fs::is_directory(path, error)) {
      files.push_back(path);
      continue;
    }
    const size_t before = files.size();
    for (const fs::directory_entry& entry : fs::directory_iterator(path))
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path().string());
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
    if (files.size() == before)
      throw Error(ErrorCode::kInvalidArgument,
                  "verify: " + path + ": expected .safetensors files, found none");
  }
  return files;
}

void print_skipped() {
  for (const KernelInfo& k : support())
    for (const char* stage : {"write", "locate", "attend"})
      if (k.stage == stage && !k.available)
        fmt::print("skipped: {} {} ({})\n", k.stage, k.kernel, k.reason);
}

int run_verify(const std::vector<std::string>& paths, bool json) {
  detail::check_environment();  // else every check would fail with it
  int64_t passed = 0, failed = 0;
  bool unreadable = false;
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const std::string& file : files_of(paths)) {
    try {
      for (const tools::Verdict& v : tools::check_golden(file)) {
        if (!v.skipped) (v.ok ? passed : failed) += 1;
        if (json)
          list.push_back({{"file", v.file},
                          {"check", v.check},
                          {"kernel", v.kernel},
                          {"ok", v.ok},
                          {"skipped", v.skipped},
                          {"deviation", v.deviation}});
        else
          fmt::print("{}  {:<24} {:<10}  {:<12} {}\n",
                     v.skipped ? "skip"
                     : v.ok    ? "ok  "
                               : "FAIL",
                     v.file, v.check, v.kernel, v.deviation);
      }
    } catch (const Error& e) {
      const std::string what = e.what();
      const bool named = what.find(file) != std::string::npos;
      fmt::print(stderr, "winnow: error: {}{}\n", named ? "" : file + ": ", what);
      unreadable = true;
    }
  }
  if (json) {
    const nlohmann::ordered_json all{{"passed", passed}, {"failed", failed}, {"checks", list}};
    // A file's name may be any bytes; JSON is UTF-8.
    fmt::print("{}\n", all.dump(1, ' ', false, nlohmann::ordered_json::error_handler_t::replace));
  } else {
    print_skipped();
    fmt::print("{} passed, {} failed\n", passed, failed);
  }
  return unreadable ? 2 : failed > 0 ? 1 : 0;
}

}  // namespace

void add_verify(CLI::App& app, Outcome& outcome) {
  CLI::App* cmd =
      app.add_subcommand("verify", "Check write, locate and attend against golden vectors");
  cmd->footer(
      "Every kernel that this machine can run is checked. Exit status: 1 if a check fails, 2 if a\n"
      "file cannot be read.\n"
      "Examples:\n  winnow verify tests/data/golden\n  winnow verify a.safetensors b.safetensors "
      "--json");
  auto paths = std::make_shared<std::vector<std::string>>();
  auto json = std::make_shared<bool>(false);
  cmd->add_option("path", *paths, "Files, or folders of .safetensors files")->required();
  cmd->add_flag("--json", *json, "Print JSON");
  cmd->callback([paths, json, &outcome] { outcome.code = run_verify(*paths, *json); });
}

}  // namespace winnow::cli
