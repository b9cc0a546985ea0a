// The program as a test calls it: its exit status, what it printed, and its JSON.
#pragma once
#include <sys/wait.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "testing.h"

namespace winnow {

using json = nlohmann::ordered_json;  // a second kind takes seconds to compile

class Cli : public ::testing::Test {
 protected:
  struct Output {
    int code;
    std::string out, err;
  };

  void SetUp() override {
    folder_ = ::testing::TempDir() + "winnow_cli_" +
              ::testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override {
    if (!folder_.empty()) std::filesystem::remove_all(folder_);
  }

  std::string path(const std::string& name) const { return folder_ + "/" + name; }
  static std::string text_of(const std::string& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  Output run(const std::string& arguments, const std::string& environment = {}) const {
    return start(WINNOW_PROGRAM, arguments, environment);
  }
  Output start(const std::string& program, const std::string& arguments,
               const std::string& environment = {}) const {
    const std::string command = environment + " '" + program + "' " + arguments + " >'" +
                                path("out") + "' 2>'" + path("err") + "'";
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, text_of(path("out")),
            text_of(path("err"))};
  }
  json run_json(const std::string& arguments) const {
    const Output o = run(arguments);
    EXPECT_EQ(o.code, 0) << arguments << "\n" << o.err;
    return json::parse(o.out);
  }
  static void expect_in(const std::string& text, std::initializer_list<const char*> words) {
    for (const char* w : words) EXPECT_NE(text.find(w), std::string::npos) << w << "\n" << text;
  }

 private:
  std::string folder_;
};

}  // namespace winnow
