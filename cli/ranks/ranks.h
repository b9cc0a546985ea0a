// What the two commands of winnow-ranks share: options, and a communicator that counts.
#pragma once

#include <charconv>
#include <chrono>
#include <map>
#include <string>
#include <system_error>

#include "winnow/error.h"
#include "winnow/parallel.h"

namespace winnow::cli {

// What a word may be: any text, or a whole number of a range.
struct Allowed {
  int64_t least = 0, most = -1;
  bool text() const { return most < least; }
};

// "--name value" pairs behind the command, as `winnow run --ranks` and `winnow bench parallel` hand
// them on.
class Words {
 public:
  Words(int argc, char** argv, const std::map<std::string, Allowed>& known) {
    for (int i = 2; i < argc; i += 2) {
      const std::string word = argv[i];
      const std::string name = word.starts_with("--") ? word.substr(2) : "";
      const auto found = known.find(name);
      if (found == known.end())
        throw Error(ErrorCode::kInvalidArgument, "unknown option '" + word + "'");
      if (i + 1 == argc) throw Error(ErrorCode::kInvalidArgument, word + ": expected a value");
      words_[name] = argv[i + 1];
      const Allowed& allowed = found->second;
      if (allowed.text()) continue;
      const int64_t value = number(name, 0);
      if (value < allowed.least || value > allowed.most)
        throw Error(ErrorCode::kInvalidArgument,
                    word + ": expected " + std::to_string(allowed.least) + " to " +
                        std::to_string(allowed.most) + ", found " + std::to_string(value));
    }
  }
  std::string text(const std::string& name, const std::string& otherwise) const {
    const auto found = words_.find(name);
    return found == words_.end() ? otherwise : found->second;
  }
  int64_t number(const std::string& name, int64_t otherwise) const {
    const auto found = words_.find(name);
    if (found == words_.end()) return otherwise;
    int64_t value = 0;
    const std::string& text = found->second;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size())
      throw Error(ErrorCode::kInvalidArgument,
                  "--" + name + ": expected a whole number, found '" + text + "'");
    return value;
  }

 private:
  std::map<std::string, std::string> words_;
};

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Another communicator, with the bytes that come in from other ranks, the calls and their time.
class CountedRanks final : public Communicator {
 public:
  explicit CountedRanks(Communicator& comm) : comm_(comm) {}
  int32_t rank() const noexcept override { return comm_.rank(); }
  int32_t size() const noexcept override { return comm_.size(); }
  const char* name() const noexcept override { return comm_.name(); }
  bool takes(DeviceKind kind) const noexcept override { return comm_.takes(kind); }
  void all_gather(const void* send, void* recv, size_t bytes, const Device& device) override {
    timed(bytes, [&] { comm_.all_gather(send, recv, bytes, device); });
  }
  void all_to_all(const void* send, void* recv, size_t bytes, const Device& device) override {
    timed(bytes, [&] { comm_.all_to_all(send, recv, bytes, device); });
  }
  void exchange(const void* send, void* recv, size_t bytes) override {
    comm_.exchange(send, recv, bytes);
  }
  void check() override { comm_.check(); }

  int64_t calls = 0, bytes = 0;
  double seconds = 0;

 private:
  template <class F>
  void timed(size_t block, F&& call) {
    const double began = seconds_now();
    call();
    seconds += seconds_now() - began;
    ++calls;
    bytes += static_cast<int64_t>(block) * (size() - 1);
  }
  Communicator& comm_;
};

Spread spread_of(const std::string& name);  // "heads", "context", "queries", "sharded"

int run_ranks(const Words& words, Communicator& comm);
int bench_ranks(const Words& words, Communicator& comm);

}  // namespace winnow::cli
