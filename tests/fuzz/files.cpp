// Damaged safetensors files: an Error that names the file, or tensors whose every byte can be read.
#include "safetensors.h"
#include "target.h"
#include "winnow/error.h"

namespace winnow::testing {
namespace {

// Splices, cuts and flips of a valid file.
std::vector<std::byte> damaged(Source& s) {
  const std::vector<float> a = {1, 2, 3, 4, 5, 6};
  const std::vector<int32_t> b = {-1, 7};
  const std::vector<std::byte> whole =
      tools::encode_safetensors({{"a", tensor(a.data(), {2, 3})}, {"b", tensor(b.data(), {2})}});
  std::vector<std::byte> file = whole;
  for (int64_t edits = draw(s, 1, 4); edits > 0 && !file.empty(); --edits) {
    const int64_t at = draw(s, 0, std::ssize(file) - 1), from = draw(s, 0, std::ssize(whole) - 1);
    const int64_t n = draw(s, 0, std::ssize(whole) - from);
    switch (draw(s, 0, 3)) {
      case 0: file[at] ^= static_cast<std::byte>(1 << draw(s, 0, 7)); break;
      case 1: file.resize(at); break;
      case 2: file.insert(file.begin() + at, whole.begin() + from, whole.begin() + from + n); break;
      default: file[at] = whole[from];
    }
  }
  return file;
}

void run(Source& s) {
  const std::span<const std::byte> input = std::as_bytes(s.input());
  const std::vector<std::byte> file =
      input.empty() ? damaged(s) : std::vector<std::byte>(input.begin(), input.end());
  try {
    const auto parsed = tools::Safetensors::parse(file, "fuzz");
    double sum = 0;
    for (const auto& [name, t] : parsed.tensors())
      for (int64_t i = 0; i < t.size(); ++i) sum += tools::element(t, i);
    volatile double kept = sum;  // so that every element is read
    (void)kept;
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("fuzz"), std::string::npos) << e.what();
  }
}

const FuzzTarget files_target{"files", 50, run};

}  // namespace
}  // namespace winnow::testing
