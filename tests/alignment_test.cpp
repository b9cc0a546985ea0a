// On the CPU the alignment of elements is enough: rows of bf16 at any even address, pages wherever
// their largest element may begin. Every kernel gives the bits that it gives for aligned memory.
#include <cstring>

#include "model/index.h"
#include "testing.h"
#include "winnow/winnow.h"

namespace winnow {
namespace {

using testing::draw;
using testing::Guarded;

constexpr int64_t kTokens = 5, kHeads = 19, kWidth = 70, kPage = 7, kPages = 9;

// `bytes` bytes that begin `shift` bytes behind a multiple of 64.
struct Shifted {
  Guarded<std::byte> memory;
  int64_t shift;
  Shifted(int64_t bytes, int64_t by) : memory(bytes + by), shift(by) {}
  template <class T>
  T* at() {
    return reinterpret_cast<T*>(memory.data() + shift);
  }
};

int64_t element_of(CacheFormat format) {
  return format == CacheFormat::kV32Fp8 || format == CacheFormat::kIndexKeys ? 4 : 2;
}

// The tensors of one layer at addresses and strides that are as odd as `steps` elements say.
struct World {
  CacheFormat format;
  int64_t element, d, stride;
  int64_t row;  // of q and out, in elements
  Shifted cache, kv, q, out, rows;
  std::vector<int64_t> slots = std::vector<int64_t>(kPage * kPages);
  std::vector<int32_t> lists = std::vector<int32_t>(kTokens * kWidth);

  World(CacheFormat f, int64_t steps)
      : format(f),
        element(element_of(f)),
        d(record_dim(f)),
        stride(page_bytes(f, kPage) + steps * element),
        row(d + steps),
        cache(stride * kPages, steps * element),
        kv(kPage * kPages * row * 2, steps * 2),
        q(kTokens * kHeads * row * 2, steps * 2),
        out(kTokens * kHeads * (512 + steps) * 2, steps * 2),
        rows(kPage * kPages * row * 2, steps * 2) {
    testing::Rng rng(7);
    std::memset(cache.at<std::byte>(), 0, stride * kPages);
    const auto fill = [&](bf16* to, int64_t count) {
      for (int64_t r = 0; r < count; ++r)
        for (int64_t i = 0; i < d; ++i)
          to[r * row + i] = {static_cast<uint16_t>(draw(rng, 0x3e00, 0x4000))};
    };
    fill(kv.at<bf16>(), kPage * kPages);
    fill(q.at<bf16>(), kTokens * kHeads);
    for (size_t i = 0; i < slots.size(); ++i) slots[i] = i;
    for (int32_t& x : lists) x = static_cast<int32_t>(draw(rng, -2, kPage * kPages));
  }

  Cache view() { return {cache.at<std::byte>(), format, kPages, kPage, stride}; }

  void store(const char* kernel) {
    write({.kv = tensor(kv.at<bf16>(), {kPage * kPages, d}, {row, 1}),
           .slots = tensor(slots.data(), {kPage * kPages}),
           .cache = view(),
           .target = {.kernel = kernel}});
  }
  // The written pages, without what lies between them.
  std::vector<std::byte> pages() {
    std::vector<std::byte> all;
    const int64_t used = page_bytes_used(format, kPage);
    for (int64_t p = 0; p < kPages; ++p)
      all.insert(all.end(), cache.at<std::byte>() + p * stride,
                 cache.at<std::byte>() + p * stride + used);
    return all;
  }
  std::vector<uint16_t> gathered(const char* kernel) {
    int32_t table[kPages], length = kPage * kPages;
    for (int32_t p = 0; p < kPages; ++p) table[p] = kPages - 1 - p;
    gather({.cache = view(),
            .block_table = tensor(table, {1, kPages}),
            .lengths = tensor(&length, {1}),
            .out = tensor(rows.at<bf16>(), {kPage * kPages, d}, {row, 1}),
            .target = {.kernel = kernel}});
    return values(rows.at<bf16>(), kPage * kPages, d, row);
  }
  std::vector<uint16_t> attended(const char* kernel) {
    const int64_t out_row = 512 + (row - d);
    AttendArgs a{
        .q = tensor(q.at<bf16>(), {kTokens, kHeads, d}, {kHeads * row, row, 1}),
        .scale = 0.05f,
        .out = tensor(out.at<bf16>(), {kTokens, kHeads, 512}, {kHeads * out_row, out_row, 1}),
        .target = {.kernel = kernel}};
    a.lists[0] = {.cache = view(), .indices = tensor(lists.data(), {kTokens, kWidth})};
    attend(a);
    return values(out.at<bf16>(), kTokens * kHeads, 512, out_row);
  }
  std::vector<float> scored(const char* kernel) {
    constexpr int64_t kIndexHeads = 3, kKeys = kPage * kPages;
    std::vector<e4m3> index_q(kTokens * kIndexHeads * kIndexDim, e4m3{0x38});
    std::vector<bf16> wide_q(index_q.size(), bf16{0x3f80});
    const bool wide = format == CacheFormat::kIndexKeysBf16;
    const std::initializer_list<int64_t> shape = {kTokens, kIndexHeads, kIndexDim};
    std::vector<float> weights(kTokens * kIndexHeads, 0.25f), logits(kTokens * kKeys);
    std::vector<int32_t> table(kPages), requests(kTokens), ends(kTokens, kKeys);
    for (int32_t p = 0; p < kPages; ++p) table[p] = p;
    score({.q = wide ? tensor(wide_q.data(), shape) : tensor(index_q.data(), shape),
           .weights = tensor(weights.data(), {kTokens, kIndexHeads}),
           .keys = view(),
           .block_table = tensor(table.data(), {1, kPages}),
           .requests = tensor(requests.data(), {kTokens}),
           .ends = tensor(ends.data(), {kTokens}),
           .logits = tensor(logits.data(), {kTokens, kKeys}),
           .target = {.kernel = kernel}});
    return logits;
  }
  static std::vector<uint16_t> values(const bf16* from, int64_t rows, int64_t width, int64_t row) {
    std::vector<uint16_t> all;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) all.push_back(from[r * row + i].bits);
    return all;
  }
};

class Alignment : public ::testing::TestWithParam<CacheFormat> {};

// Each kernel of a stage over aligned memory, and over memory shifted by 1, 3 and 5 elements.
template <class F>
void compare(const char* stage, CacheFormat format, F&& result) {
  for (const std::string& kernel : testing::cpu_kernels(stage)) {
    if (!testing::why_not(stage, kernel).empty()) continue;  // stage tests name what is missing
    if (format == CacheFormat::kIndexKeysBf16 && !testing::reads_bf16_keys(kernel)) continue;
    World aligned(format, 0);
    aligned.store("reference");
    const auto want = result(aligned, kernel.c_str());
    for (const int64_t steps : {1, 3, 5}) {
      World shifted(format, steps);
      shifted.store("reference");
      EXPECT_TRUE(result(shifted, kernel.c_str()) == want)
          << stage << " by " << kernel << ", " << steps << " elements off";
    }
  }
}

TEST_P(Alignment, WriteAndGather) {
  compare("write", GetParam(), [](World& w, const char* kernel) {
    w.store(kernel);
    return w.pages();
  });
  if (is_index(GetParam())) return;
  compare("gather", GetParam(), [](World& w, const char* kernel) { return w.gathered(kernel); });
}

TEST_P(Alignment, Read) {
  if (is_index(GetParam()))
    compare("score", GetParam(), [](World& w, const char* kernel) { return w.scored(kernel); });
  else
    compare("attend", GetParam(), [](World& w, const char* kernel) { return w.attended(kernel); });
}

INSTANTIATE_TEST_SUITE_P(Formats, Alignment,
                         ::testing::ValuesIn(cache_formats().begin(), cache_formats().end()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace winnow
