// Which list entries are valid: every kernel against resolve(), and resolve() against the contract
// of attend.h, entry by entry. Each token has one entry that may be valid, of a value at or past an
// edge, among entries that are not. A record says its slot in the signs of its values, so a
// kernel's output shows which record it read, if any.
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <ostream>

#include "attend/attend_cases.h"
#include "attend/attend_problem.h"
#include "attend/kernel.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/attend.h"
#include "winnow/error.h"

namespace winnow {
namespace {

using internal::attend::Case;
using internal::attend::Entry;
using internal::attend::kInf;
using internal::attend::ListView;
using internal::attend::resolve;
using testing::Guarded;

struct Layout {
  const char* name;
  CacheFormat format;
  int32_t page;
  int64_t pages;
  bool logical;
};
void PrintTo(const Layout& layout, std::ostream* out) { *out << layout.name; }

// Slots, then ids through a block table whose pages are hostile, too.
const Layout kLayouts[] = {
    {"v32_fp8_slots", CacheFormat::kV32Fp8, 64, 5, false},
    {"v32_fp8_slots_of_3", CacheFormat::kV32Fp8, 3, 40, false},
    {"v32_fp8_table", CacheFormat::kV32Fp8, 64, 5, true},
    {"v4_fp8_slots_of_2", CacheFormat::kV4Fp8, 2, 70, false},
    {"v4_fp8_table", CacheFormat::kV4Fp8, 64, 3, true},
    {"v32_bf16_slots", CacheFormat::kV32Bf16, 64, 5, false},
    {"v32_bf16_table_of_3", CacheFormat::kV32Bf16, 3, 40, true},
    {"v4_bf16_slots", CacheFormat::kV4Bf16, 64, 3, false},
    {"v4_bf16_table", CacheFormat::kV4Bf16, 64, 3, true},
};

constexpr int64_t kHeads = 16, kWidth = 24, kRequests = 3;
constexpr int kSlotBits = 10;

// A cache of `layout` with every slot written, and a list for each value and request.
class Entries {
 public:
  explicit Entries(const Layout& layout)
      : layout_(layout),
        model_(internal::attend::model_of_format(layout.format)),
        bytes_(layout.pages * page_bytes(layout.format, layout.page), 0),
        table_width_(layout.pages + 7),
        table_(kRequests * table_width_) {
    write_records();
    const auto bad_pages = testing::hostile(layout.pages);
    for (int64_t r = 0; r < kRequests; ++r)
      for (int64_t i = 0; i < table_width_; ++i)
        table_[r * table_width_ + i] = i < layout.pages
                                           ? static_cast<int32_t>((i + r) % layout.pages)
                                           : bad_pages[i - layout.pages];
    for (const int32_t value : values())
      for (const int32_t request : requests()) {
        values_.push_back(value);
        requests_of_.push_back(request);
      }
    const auto tokens = static_cast<int64_t>(values_.size());
    indices_ = std::make_unique<Guarded<int32_t>>(tokens * kWidth);
    requests_ = std::make_unique<Guarded<int32_t>>(tokens);
    q_ = std::make_unique<Guarded<bf16>>(tokens * kHeads * model_.d_qk);
    for (bf16& x : *q_) x = to_bf16(0x1p-7f);
    // Entries around the one in question: negative, or past every page. Token 0 of three has -1
    // alone, which kernels may take for padding.
    const int32_t never[] = {-1, INT32_MIN, -2, INT32_MAX};
    for (int64_t t = 0; t < tokens; ++t) {
      (*requests_)[t] = requests_of_[t];
      for (int64_t c = 0; c < kWidth; ++c)
        (*indices_)[t * kWidth + c] = never[t % 3 == 0 ? 0 : (t + c) % 4];
      (*indices_)[t * kWidth + column(t)] = values_[t];
    }
  }

  int64_t tokens() const { return static_cast<int64_t>(values_.size()); }
  static int64_t column(int64_t token) { return token * 7 % kWidth; }

  // The slot of a token's entry, by the words of attend.h.
  std::optional<int64_t> contract(int64_t token) const {
    const int64_t index = values_[token];
    if (index < 0) return {};
    int64_t page = index / layout_.page;
    if (layout_.logical) {
      const int64_t request = requests_of_[token];
      if (page >= table_width_ || request < 0 || request >= kRequests) return {};
      page = table_[request * table_width_ + page];
      if (page < 0) return {};
    }
    if (page >= layout_.pages) return {};
    return page * layout_.page + index % layout_.page;
  }

  Entry resolved(int64_t token) {
    ListView view{.page = layout_.page, .pages = layout_.pages};
    if (layout_.logical) {
      view.block_table = table_.data();
      view.table_stride = table_width_;
      view.table_rows = kRequests;
      view.table_width = static_cast<int32_t>(table_width_);
    }
    return resolve(view, values_[token], requests_of_[token]);
  }

  AttendArgs args() {
    AttendArgs a{.q = tensor(q_->data(), {tokens(), kHeads, model_.d_qk}), .scale = 1.0f};
    a.lists[0].cache = cache();
    a.lists[0].indices = tensor(indices_->data(), {tokens(), kWidth});
    if (layout_.logical) {
      a.lists[0].block_table = tensor(table_.data(), {kRequests, table_width_});
      a.requests = tensor(requests_->data(), {tokens()});
    }
    return a;
  }

 private:
  Cache cache() {
    return {bytes_.data(), layout_.format, layout_.pages, layout_.page,
            page_bytes(layout_.format, layout_.page)};
  }

  // Values of 1 and -1, exact in every format.
  void write_records() {
    const int64_t slots = layout_.pages * layout_.page, d = model_.d_qk;
    std::vector<bf16> kv(slots * d);
    std::vector<int64_t> where(slots);
    for (int64_t s = 0; s < slots; ++s) {
      where[s] = s;
      for (int64_t i = 0; i < d; ++i)
        kv[s * d + i] = to_bf16((s >> i % kSlotBits & 1) != 0 ? 1.0f : -1.0f);
    }
    write({.kv = tensor(kv.data(), {slots, d}),
           .slots = tensor(where.data(), {slots}),
           .cache = cache(),
           .scale = ScaleMode::kPow2,
           .target = {.kernel = "reference"}});
  }

  std::vector<int32_t> values() const {
    const int64_t slots = layout_.pages * layout_.page, ids = table_width_ * layout_.page;
    const int64_t edges[] = {
        0,         1,     layout_.page - 1, layout_.page,
        slots - 1, slots, slots + 1,        slots + layout_.page,
        ids - 1,   ids,   int64_t{1} << 30, (int64_t{1} << 31) - layout_.page - 1};
    std::vector<int32_t> all(edges, edges + std::size(edges));
    for (int64_t page = layout_.pages; page < table_width_; ++page)
      all.push_back(static_cast<int32_t>(page * layout_.page));
    for (const int32_t x : testing::hostile(slots)) all.push_back(x);
    return all;
  }
  std::vector<int32_t> requests() const {
    if (!layout_.logical) return {0};
    return {0, kRequests - 1, kRequests, -1, INT32_MIN, INT32_MAX};
  }

  Layout layout_;
  const Model& model_;
  Guarded<uint8_t> bytes_;
  int64_t table_width_;
  Guarded<int32_t> table_;
  std::vector<int32_t> values_, requests_of_;
  std::unique_ptr<Guarded<int32_t>> indices_, requests_;
  std::unique_ptr<Guarded<bf16>> q_;
};

TEST(AttendEntries, ResolveKeepsTheContract) {
  for (const Layout& layout : kLayouts) {
    Entries entries(layout);
    int64_t valid = 0;
    for (int64_t t = 0; t < entries.tokens(); ++t) {
      const std::optional<int64_t> want = entries.contract(t);
      const Entry got = entries.resolved(t);
      ASSERT_EQ(got.page >= 0, want.has_value()) << layout.name << ", token " << t;
      if (!want) continue;
      EXPECT_EQ(got.page * layout.page + got.offset, *want) << layout.name << ", token " << t;
      ++valid;
    }
    EXPECT_GE(valid, 5) << layout.name;
    EXPECT_GE(entries.tokens() - valid, 10) << layout.name;
  }
}

class AttendEntries : public ::testing::TestWithParam<std::tuple<std::string, Layout>> {};

TEST_P(AttendEntries, KernelsReadWhatResolveSays) {
  const auto& [kernel, layout] = GetParam();
  if (const std::string why = testing::why_not("attend", kernel); !why.empty()) GTEST_SKIP() << why;
  const Case like{.name = layout.name, .list = {{layout.format}}};
  if (internal::attend::left_out(kernel, like)) return;  // attend_test holds what it says then
  Entries entries(layout);
  constexpr int64_t kValues = internal::attend::kValueDim;
  Guarded<bf16> out(entries.tokens() * kHeads * kValues);
  Guarded<float> lse(entries.tokens() * kHeads);
  AttendArgs args = entries.args();
  args.out = tensor(out.data(), {entries.tokens(), kHeads, kValues});
  args.lse = tensor(lse.data(), {entries.tokens(), kHeads});
  args.target = testing::target("attend", kernel);
  args.precision = internal::attend::precision_of(kernel);
  try {
    internal::attend::attend_with_workspace(args);
  } catch (const Error& e) {
    const char* reason = internal::attend::may_leave_out(kernel);
    if (e.code() != ErrorCode::kUnsupported || !reason || !std::strstr(e.what(), reason)) throw;
    GTEST_SKIP() << e.what();
  }
  for (int64_t t = 0; t < entries.tokens(); ++t) {
    const std::optional<int64_t> want = entries.contract(t);
    for (int64_t h = 0; h < kHeads; ++h) {
      const int64_t row = t * kHeads + h;
      if (!want) {
        EXPECT_EQ(lse[row], kInf) << "token " << t << " read a record";
        EXPECT_EQ(to_float(out[row * kValues]), 0.0f) << "token " << t;
        continue;
      }
      ASSERT_TRUE(std::isfinite(lse[row])) << "token " << t << " read no record";
      int64_t slot = 0;
      for (int i = 0; i < kSlotBits; ++i)
        slot |= int64_t{to_float(out[row * kValues + i]) > 0} << i;
      EXPECT_EQ(slot, *want) << "token " << t << ", head " << h;
    }
  }
}

std::vector<std::string> all_kernels() {
  std::vector<std::string> all = testing::kernels("attend");
  for (std::string& member : testing::members("attend")) all.push_back(std::move(member));
  return all;
}
INSTANTIATE_TEST_SUITE_P(Kernels, AttendEntries,
                         ::testing::Combine(::testing::ValuesIn(all_kernels()),
                                            ::testing::ValuesIn(kLayouts)),
                         [](const auto& info) {
                           return testing::label(std::get<0>(info.param)) + "_" +
                                  std::get<1>(info.param).name;
                         });

}  // namespace
}  // namespace winnow
