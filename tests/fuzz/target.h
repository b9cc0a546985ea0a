// What the fuzz targets share: their registry, random sizes and hostile indices, the kernels to
// compare, and the comparisons.
#pragma once

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "../testing.h"
#include "accuracy.h"
#include "core/formats.h"
#include "source.h"

namespace winnow::testing {

// A problem from a source: draws one, runs every kernel on it and reports by EXPECT_*. A file
// defines one with `const FuzzTarget name_target{...}` and is compiled into the tests, which run
// all of them, and into a program of libFuzzer's.
struct FuzzTarget {
  std::string name;
  int times;  // a round of fixed seeds runs so many: cheap problems more often
  void (*run)(Source&);

  FuzzTarget(const char* n, int t, void (*r)(Source&)) : name(n), times(t), run(r) {
    all().push_back(*this);
  }
  static std::vector<FuzzTarget>& all() {
    static std::vector<FuzzTarget> targets;
    return targets;
  }
};

inline int64_t draw(Source& source, int64_t lo, int64_t hi) { return source.draw(lo, hi); }
inline int32_t draw32(Source& source, int32_t lo, int32_t hi) {
  return static_cast<int32_t>(source.draw(lo, hi));
}
inline bool chance(Source& source, int percent) { return source.draw(0, 99) < percent; }

// Mostly values of [0, length), some that must never be dereferenced.
inline int32_t index_for(Source& source, int64_t length, int hostile_percent) {
  if (length > 0 && !chance(source, hostile_percent))
    return static_cast<int32_t>(source.draw(0, length - 1));
  const auto bad = hostile(length);
  return bad[source.draw(0, static_cast<int64_t>(bad.size()) - 1)];
}

inline Guarded<int32_t> indices(Source& source, int64_t count, int64_t length,
                                int hostile_percent = 10) {
  Guarded<int32_t> values(count);
  for (int32_t& v : values) v = index_for(source, length, hostile_percent);
  return values;
}

inline Guarded<bf16> normals(Source& source, int64_t count, float sigma = 1) {
  Guarded<bf16> values(count);
  for (bf16& x : values) x = to_bf16(source.normal() * sigma);
  return values;
}

// Power-of-two pages take the vector paths, others the general ones.
inline int32_t page_size(Source& source) {
  return static_cast<int32_t>(chance(source, 70) ? int64_t{1} << source.draw(0, 6)
                                                 : source.draw(1, 70));
}

// The kernels to compare: the CPU kernels that run here, or the one that a CUDA device chooses.
enum class Compared { kCpu, kCuda };
inline Compared compared = Compared::kCpu;

struct Candidate {
  std::string name;
  bool cuda = false;
  Target target() const {
    return cuda ? Target{.device = winnow::cuda()} : Target{{}, name.c_str()};
  }
};

// The kernels of a stage, the reference first.
inline const std::vector<Candidate>& candidates(const std::string& stage) {
  static std::map<std::pair<std::string, Compared>, std::vector<Candidate>> known;
  std::vector<Candidate>& all = known[{stage, compared}];
  if (!all.empty()) return all;
  for (const KernelInfo& k : support())
    if (k.stage == stage && k.device == "cpu" && k.available &&
        (compared == Compared::kCpu || k.kernel == "reference"))
      all.push_back({k.kernel});
  std::reverse(all.begin(), all.end());
  if (compared == Compared::kCuda) all.push_back({"cuda", true});
  EXPECT_TRUE(all.size() > 1 && all.front().name == "reference") << stage;
  return all;
}

// Every call's results can be read when this has returned.
inline void finish(const Candidate& kernel) {
  EXPECT_TRUE(!kernel.cuda || device_finished()) << kernel.name;
}

// The bits of an output against the reference's.
template <class T>
void expect_same(const Guarded<T>& got, const std::vector<T>& want, const std::string& what) {
  if (want.empty() || std::memcmp(got.data(), want.data(), want.size() * sizeof(T)) == 0) return;
  size_t at = 0;
  while (std::memcmp(&got[at], &want[at], sizeof(T)) == 0) ++at;
  ADD_FAILURE() << what << ": element " << at << " of " << want.size() << " differs";
}

// Whether a kernel serves a call. Verbs of which some kernels do not have an overload.
template <class Args>
bool serves(const Candidate&, const Args&) {
  return true;
}

// Calls the verb with every kernel that serves it and compares `outputs` (Guarded), poisoned before
// each, with the reference's, bit for bit.
template <class Args, class... Outputs>
void expect_exact(const std::string& stage, void (*verb)(const Args&), Args& args,
                  Outputs&... outputs) {
  std::tuple<std::vector<typename Outputs::Value>...> want;
  for (const Candidate& kernel : candidates(stage)) {
    if (!serves(kernel, args)) continue;
    (outputs.poison(), ...);
    args.target = kernel.target();
    verb(args);
    finish(kernel);
    if (kernel.name == "reference") want = {outputs.values()...};
    std::apply(
        [&](const auto&... expected) {
          (expect_same(outputs, expected, stage + ": " + kernel.name), ...);
        },
        want);
  }
}

// The bar of attention's output for tensors of any size: every element as in decoding. The cosine
// of that bar is a mean of many elements; few may all be rounded the same way, by 2^-9 in P, in V
// and in both outputs: (4 * 2^-9)^2 / 2.
inline constexpr tools::Bar kOutBar{tools::kDecodeOut.absolute, tools::kDecodeOut.relative,
                                    0x1p-15};

// A tensor against the reference's values of it. `magnitude`: see tools::compare().
template <class T>
void expect_close(const std::string& what, const Tensor& got, const std::vector<T>& want,
                  const tools::Bar& bar, const Tensor& magnitude = {}) {
  Tensor expected = got;
  expected.data = const_cast<T*>(want.data());
  const tools::Deviation d = tools::compare(got, expected, bar, magnitude);
  EXPECT_TRUE(d.ok) << what << ": " << d.text(got);
}

}  // namespace winnow::testing
