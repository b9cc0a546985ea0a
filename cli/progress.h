// A line on stderr that says how far the work is: rewritten in place on a terminal, and a few plain
// lines elsewhere.
#pragma once

#include <string>

namespace winnow::cli {

class Progress {
 public:
  explicit Progress(int64_t total);
  ~Progress();  // clears the line
  void at(int64_t done, const std::string& what);

 private:
  bool terminal_;
  int64_t total_, lines_ = 0;
};

}  // namespace winnow::cli
