// A line on stderr that says how far the work is: rewritten in place on a terminal; elsewhere a
// plain line every few seconds, so that a long run says what it is at and a short one nothing.
#pragma once

#include <chrono>
#include <string>

namespace winnow::tools {

class Progress {
 public:
  Progress();
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void at(const std::string& what);
  void done(const std::string& what);  // the last one, which is said anywhere
  void clear();                        // before something else is printed

 private:
  void say(const std::string& what);
  bool terminal_;
  std::chrono::steady_clock::time_point said_;
};

}  // namespace winnow::tools
