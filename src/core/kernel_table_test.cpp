// Choosing a kernel: order, machine, shape, request, environment, and what the error says.
#include "core/kernel_table.h"

#include <cstdlib>

#include "testing.h"
#include "winnow/error.h"

namespace winnow {
namespace {

struct Shape {
  int heads = 8;
};
struct Params {
  Device device;
};
using K = Kernel<Shape, Params>;

std::string no_tiles() { return "this CPU has no tiles"; }
const char* few_heads(const Shape& s) { return s.heads > 16 ? "more than 16 heads" : nullptr; }
void nothing(const Params&) noexcept {}

const K table[] = {
    {{"gpu", DeviceKind::kCuda, false, detail::any_machine}, nullptr, nothing},
    {{"tiles", DeviceKind::kCpu, false, no_tiles}, nullptr, nothing},
    {{"small", DeviceKind::kCpu, false, detail::any_machine}, few_heads, nothing},
    {{"simd", DeviceKind::kCpu, false, detail::any_machine}, nullptr, nothing},
    {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, nothing},
};

// Sets WINNOW_KERNEL for the life of the object.
class Environment {
 public:
  explicit Environment(const char* value) { setenv("WINNOW_KERNEL", value, 1); }
  ~Environment() { unsetenv("WINNOW_KERNEL"); }
};

std::string pick(Target target = {}, Shape shape = {}, const char* stage = "stage") {
  return choose(stage, std::span<const K>(table), shape, target).name;
}

TEST(KernelTable, TakesTheFirstThatFits) {
  unsetenv("WINNOW_KERNEL");
  EXPECT_EQ(pick(), "small");
  EXPECT_EQ(pick({}, {17}), "simd");
  EXPECT_STREQ(detail::last_chosen(), "simd");
  EXPECT_EQ(pick({.device = cuda()}), "gpu");
  std::string reasons;
  choose("stage", std::span<const K>(table), Shape{17}, Target{}, &reasons);
  EXPECT_EQ(reasons,
            " gpu (runs on CUDA); tiles (this CPU has no tiles); small (more than 16 heads)");
}

TEST(KernelTable, RequestsAreStrict) {
  EXPECT_EQ(pick({.kernel = "reference"}), "reference");
  EXPECT_EQ(pick({.kernel = "simd"}), "simd");
  const auto refuse = [](Target target, Shape shape, std::initializer_list<const char*> words) {
    testing::expect_error([&] { pick(target, shape); }, ErrorCode::kUnsupported, words);
  };
  refuse({.kernel = "fastest"}, {},
         {"stage: no kernel fits: unknown kernel 'fastest'; stage has: gpu, tiles, small, simd, "
          "reference"});
  // Every kernel is listed with its reason where one has the name.
  refuse({.kernel = "tiles"}, {},
         {"stage: no kernel fits: gpu (runs on CUDA); tiles (this CPU has no tiles); small",
          "simd ('tiles' was asked for)", "reference ('tiles' was asked for)"});
  refuse({.kernel = "small"}, {32}, {"small (more than 16 heads)"});
  refuse({.kernel = "gpu"}, {}, {"gpu (runs on CUDA)"});
  refuse({.device = cuda(), .kernel = "simd"}, {}, {"gpu ('simd' was asked for)", "the CPU"});
#ifndef WINNOW_WITH_CUDA
  refuse({.device = cuda(), .kernel = "simd"}, {},
         {"stage: no kernel fits: sm90 (built without CUDA: ", "gpu (", "simd"});
#endif
  try {
    pick({.kernel = "fastest"});
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
  }
}

TEST(KernelTable, EnvironmentNamesAKernelForAllStagesThatHaveIt) {
  {
    const Environment e("reference");
    EXPECT_EQ(pick(), "reference");
    EXPECT_EQ(pick({.kernel = "simd"}), "simd");  // a call's own wish counts more
    EXPECT_EQ(pick({.device = cuda()}), "gpu");   // that device has no kernel of the name
  }
  {
    const Environment e("amx");  // another stage's kernel
    EXPECT_EQ(pick(), "small");
  }
  {
    const Environment e("");
    EXPECT_EQ(pick(), "small");
  }
  {
    const Environment e("amx,simd,avx512");  // of several, those that the stage has
    EXPECT_EQ(pick(), "simd");
  }
  {
    const Environment e("simd,reference");  // the last wins
    EXPECT_EQ(pick(), "reference");
  }
  {
    const Environment e("tiles");  // known, but not here: no silent other choice
    testing::expect_error([] { pick(); }, ErrorCode::kUnsupported,
                          {"tiles (this CPU has no tiles)"});
  }
}

TEST(KernelTable, EnvironmentNamesAStage) {
  const Environment e("attend=simd,reference,score=small,select=none");
  EXPECT_EQ(pick({}, {}, "attend"), "simd");  // its own entry counts more, wherever it stands
  EXPECT_EQ(pick({}, {}, "score"), "small");
  EXPECT_EQ(pick({}, {}, "write"), "reference");
  testing::expect_error([] { pick({}, {}, "select"); }, ErrorCode::kUnsupported,
                        {"select: no kernel fits: unknown kernel 'none'; select has: gpu, tiles"});
}

TEST(KernelTable, EnvironmentWithANameThatNothingHasIsRefused) {
  const auto refuse = [](const char* value, const char* found) {
    const Environment e(value);
    testing::expect_invalid([] { pick(); },
                            {"WINNOW_KERNEL: expected kernel or stage=kernel", found});
  };
  refuse("refrence", "found 'refrence'");
  refuse("simd,atend=reference", "found 'atend=reference'");
  refuse("attend", "found 'attend'");  // a stage alone, and the two the wrong way round
  refuse("reference=attend", "found 'reference=attend'");
  const Environment e("simd,");  // nothing after the last comma
  EXPECT_EQ(pick(), "simd");
}

// The request counts, and the variable is misspelt all the same.
TEST(KernelTable, EnvironmentIsCheckedBesideARequest) {
  const Environment e("refrence");
  const Target asked{.kernel = "simd"};
  const auto words = {"WINNOW_KERNEL: expected kernel or stage=kernel", "found 'refrence'"};
  testing::expect_invalid([&] { pick(asked); }, words);
  testing::expect_invalid([&] { usable_rows("stage", std::span<const K>(table), asked); }, words);
  {
    const Environment good("stage=reference");
    EXPECT_EQ(pick(asked), "simd");
  }
}

// Two kernels of a family: the first serves small shapes, and is the slower one below four heads.
const char* slower_below_four(const Shape& s) {
  return s.heads < 4 ? "fewer than 4 heads" : nullptr;
}
const K family[] = {
    {{"tile/wide", DeviceKind::kCpu, false, detail::any_machine},
     few_heads,
     nothing,
     slower_below_four},
    {{"tile/narrow", DeviceKind::kCpu, false, detail::any_machine}, nullptr, nothing},
    {{"reference", DeviceKind::kCpu, true, detail::any_machine}, nullptr, nothing},
};
std::string pick_of_family(const char* kernel, Shape shape) {
  return choose("stage", std::span<const K>(family), shape, Target{.kernel = kernel}).name;
}

TEST(KernelTable, AFamilyIsAskedForByItsName) {
  unsetenv("WINNOW_KERNEL");
  for (const char* request : {static_cast<const char*>(nullptr), "tile"}) {
    EXPECT_EQ(pick_of_family(request, {8}), "tile/wide");
    EXPECT_EQ(pick_of_family(request, {2}), "tile/narrow");   // another is faster
    EXPECT_EQ(pick_of_family(request, {32}), "tile/narrow");  // it does not fit
  }
  EXPECT_EQ(pick_of_family("tile/wide", {2}), "tile/wide");  // by full name, whatever is faster
  testing::expect_error([] { pick_of_family("tile/wide", {32}); }, ErrorCode::kUnsupported,
                        {"tile/wide (more than 16 heads)", "tile/narrow ('tile/wide' was asked"});
  testing::expect_error([] { pick_of_family("til", {8}); }, ErrorCode::kUnsupported,
                        {"unknown kernel 'til'; stage has: tile/wide, tile/narrow, reference"});
}

TEST(KernelTable, APlansRowsAreThoseThatABatchMayNeed) {
  unsetenv("WINNOW_KERNEL");
  const auto rows = [](const char* kernel) {
    return usable_rows("stage", std::span<const K>(family), Target{.kernel = kernel});
  };
  EXPECT_EQ(rows(nullptr).rows.size(), 2u);  // the reference runs on request only
  EXPECT_STREQ(pick<K>(rows(nullptr), {2})->name, "tile/narrow");
  EXPECT_STREQ(pick<K>(rows(nullptr), {8})->name, "tile/wide");
  EXPECT_STREQ(pick<K>(rows("tile/wide"), {2})->name, "tile/wide");
  EXPECT_EQ(pick<K>(rows("tile/wide"), {32}), nullptr);
  EXPECT_STREQ(pick<K>(rows("reference"), {2})->name, "reference");
  const Environment e("reference");
  EXPECT_STREQ(pick<K>(rows(nullptr), {2})->name, "reference");
}

TEST(KernelTable, NamesBothKernelsOfACall) {
  detail::set_last_chosen("tile/wide", "tile/narrow");
  EXPECT_STREQ(detail::last_chosen(), "tile/wide + tile/narrow");
}

TEST(KernelTable, ListsItself) {
  std::vector<KernelInfo> list;
  list_kernels("stage", std::span<const K>(table), list);
  ASSERT_EQ(list.size(), 5u);
  EXPECT_EQ(list[0].device, "cuda");
  EXPECT_EQ(list[1].kernel, "tiles");
  EXPECT_FALSE(list[1].available);
  EXPECT_EQ(list[1].reason, "this CPU has no tiles");
  EXPECT_TRUE(list[3].available);
  EXPECT_EQ(list[3].stage, "stage");
}

TEST(Support, EveryStageEndsWithItsReference) {
  std::vector<KernelInfo> all = support();
  std::erase_if(all, [](const KernelInfo& k) { return k.stage == kEveryStage; });
  for (size_t i = 0; i < all.size(); ++i)
    if (i + 1 == all.size() || all[i + 1].stage != all[i].stage) {
      EXPECT_EQ(all[i].kernel, "reference") << all[i].stage;
      EXPECT_TRUE(all[i].available) << all[i].stage;
    }
  EXPECT_FALSE(cpu_name().empty());
#if defined(__x86_64__)
  EXPECT_NE(cpu_name().find(", family "), std::string::npos) << cpu_name();
#endif
  EXPECT_STREQ(version(), "0.1.0");
}

TEST(Support, ABuildWithoutCudaSaysSo) {
  const KernelInfo last = support().back();
#ifdef WINNOW_WITH_CUDA
  EXPECT_NE(last.stage, kEveryStage);
#else
  EXPECT_EQ(last.stage, kEveryStage);
  EXPECT_EQ(last.device, "cuda");
  EXPECT_FALSE(last.available);
  EXPECT_NE(last.reason.find("built without CUDA: WINNOW_CUDA="), std::string::npos) << last.reason;
#endif
}

TEST(KernelTable, SaysWhyOnlyWhereAsked) {
  const auto said = [](const char* value) {
    setenv("WINNOW_VERBOSE", value, 1);
    ::testing::internal::CaptureStderr();
    pick();
    unsetenv("WINNOW_VERBOSE");
    return ::testing::internal::GetCapturedStderr();
  };
  EXPECT_NE(said("1").find("winnow: stage: chose small"), std::string::npos);
  EXPECT_EQ(said("0"), "");
  EXPECT_EQ(said(""), "");
}

}  // namespace
}  // namespace winnow
