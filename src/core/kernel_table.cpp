#include "core/kernel_table.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "core/check.h"
#include "core/made_once.h"
#include "winnow/error.h"

namespace winnow::internal::core::detail {

namespace {

// An item of WINNOW_KERNEL: "kernel", for every stage that has it on the call's device, or
// "stage=kernel", which must exist there, and counts more.
struct Item {
  std::string_view text;
  bool of_stage() const { return text.find('=') != text.npos; }
  std::string_view name() const { return text.substr(0, text.find('=')); }  // of a stage or kernel
  std::string_view kernel() const { return text.substr(text.find('=') + 1); }
};

// Throws if no kernel, or no stage for one of its own, has the name: WINNOW_KERNEL is misspelt, and
// would be ignored.
void check_known(const Item& item) {
  static std::atomic<const std::vector<KernelInfo>*> all{nullptr};
  for (const KernelInfo& k : made_once(all, support))
    if (item.of_stage() ? item.name() == k.stage : means(item.name(), k.kernel)) return;
  throw Error(ErrorCode::kInvalidArgument,
              cat("WINNOW_KERNEL: expected kernel or stage=kernel, as `winnow support` lists them, "
                  "found '",
                  item.text, "'"));
}

// Calls `visit` for each item of WINNOW_KERNEL.
template <class F>
void each_item(F&& visit) {
  const char* env = std::getenv("WINNOW_KERNEL");
  std::string_view rest = env ? env : "";
  while (!rest.empty()) {
    const size_t comma = rest.find(',');
    visit(Item{rest.substr(0, comma)});
    rest = comma == std::string_view::npos ? std::string_view() : rest.substr(comma + 1);
  }
}

// What WINNOW_KERNEL wants of a stage. Of several items the last wins.
std::string_view forced_by_environment(std::string_view stage,
                                       std::span<const Candidate> candidates, DeviceKind device) {
  const auto known = [&](std::string_view name) {
    for (const Candidate& c : candidates)
      if (means(name, c.entry->name) && c.entry->device == device) return true;
    return false;
  };
  std::string_view forced;
  bool strict = false;
  each_item([&](const Item& item) {
    if (!item.of_stage() && known(item.name())) {
      if (!strict) forced = item.name();
    } else if (item.of_stage() && item.name() == stage) {
      forced = item.kernel();
      strict = true;
    } else {
      check_known(item);  // another stage's
    }
  });
  return forced;
}

// Set, and neither empty nor 0.
bool verbose() {
  const char* env = std::getenv("WINNOW_VERBOSE");
  return env && *env && std::string_view(env) != "0";
}

// A plan's calls allocate nothing, so the names have a place of their own.
thread_local char last[64] = "";

}  // namespace

void check_environment() { each_item(check_known); }

const char* last_chosen() { return last; }

// By hand: with cold caches a call waits for every line of code that it runs, and printf has many.
void set_last_chosen(const char* name, const char* second) {
  size_t at = 0;
  for (const char* part : {name, second ? " + " : "", second ? second : ""})
    for (; *part != '\0' && at + 1 < sizeof(last); ++part) last[at++] = *part;
  last[at] = '\0';
}

std::string_view request_of(const char* stage, std::span<const Candidate> candidates,
                            const Target& target) {
  // A misspelt WINNOW_KERNEL is an error beside a request, too, though the request overrides it.
  const std::string_view forced = forced_by_environment(stage, candidates, target.device.kind);
  return target.kernel ? target.kernel : forced;
}

namespace {

// Why a candidate is passed over; "" if it is not. Allocates only for the words.
std::string why_not(const Candidate& c, std::string_view forced, DeviceKind device) {
  const KernelEntry& k = *c.entry;
  if (k.device != device) return k.device == DeviceKind::kCpu ? "runs on the CPU" : "runs on CUDA";
  if (!forced.empty() && !means(forced, k.name)) return cat("'", forced, "' was asked for");
  if (forced != k.name && k.on_request) return "runs on request only";
  if (std::string why = k.machine(); !why.empty()) return why;
  if (c.misfit) return c.misfit;
  return c.slower && forced != k.name ? c.slower : "";
}

// The same without words: a call without a plan, a step of a pipeline's among them, chooses its
// kernel and allocates nothing.
bool fits(const Candidate& c, std::string_view forced, DeviceKind device) {
  const KernelEntry& k = *c.entry;
  return k.device == device && (forced.empty() || means(forced, k.name)) &&
         (forced == k.name || !k.on_request) && k.machine().empty() && !c.misfit &&
         (!c.slower || forced == k.name);
}

// That no kernel of the stage has the name that was asked for, and the names that there are; "" if
// one has it.
std::string unknown(const char* stage, std::span<const Candidate> candidates,
                    std::string_view forced) {
  std::string names;
  for (const Candidate& c : candidates) {
    if (forced.empty() || means(forced, c.entry->name)) return "";
    names += cat(names.empty() ? "" : ", ", c.entry->name);
  }
  return cat(" unknown kernel '", forced, "'; ", stage, " has: ", names);
}

// Why a build for the CPU serves no call on a GPU, as support() says it, to stand before the
// stage's kernels; "" elsewhere.
std::string lacks_cuda(DeviceKind device) {
  if (device != DeviceKind::kCuda) return "";
  for (const KernelInfo& k : support())
    if (k.stage == kEveryStage) return cat(" ", k.kernel, " (", k.reason, ");");
  return "";
}

}  // namespace

size_t choose(const char* stage, std::span<const Candidate> candidates, const Target& target,
              std::string* reasons) {
  const std::string_view forced = request_of(stage, candidates, target);
  const DeviceKind device = target.device.kind;
  size_t chosen = 0;
  while (chosen < candidates.size() && !fits(candidates[chosen], forced, device)) ++chosen;
  const bool found = chosen < candidates.size(), told = found && verbose();
  if (!found || told || reasons) {
    std::string skipped;
    for (const Candidate& c : candidates.first(chosen))
      skipped +=
          cat(skipped.empty() ? " " : "; ", c.entry->name, " (", why_not(c, forced, device), ")");
    if (!found) {
      if (std::string u = unknown(stage, candidates, forced); !u.empty()) skipped = std::move(u);
      throw Error(ErrorCode::kUnsupported,
                  cat(stage, ": no kernel fits:", lacks_cuda(device), skipped));
    }
    if (told)
      std::fprintf(stderr, "winnow: %s: chose %s%s%s\n", stage, candidates[chosen].entry->name,
                   skipped.empty() ? "" : "; passed over", skipped.c_str());
    if (reasons) *reasons = std::move(skipped);
  }
  set_last_chosen(candidates[chosen].entry->name);
  return chosen;
}

}  // namespace winnow::internal::core::detail
