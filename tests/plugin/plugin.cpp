// A plugin that holds winnow and hides its symbols, as an engine's extension does: write() and
// attend() over enough tokens for the pool.
#include <winnow/winnow.h>

#include <vector>

extern "C" __attribute__((visibility("default"))) int first_output();
extern "C" __attribute__((visibility("default"))) void refuse();

void refuse() { winnow::page_bytes(winnow::CacheFormat::kV32Fp8, 0); }

int first_output() {
  using namespace winnow;
  constexpr int64_t kTokens = 64, kHeads = 16;
  const bf16 one{0x3f80};
  const std::vector<bf16> kv(kTokens * kV32.d_qk, one), q(kTokens * kHeads * kV32.d_qk, one);
  std::vector<bf16> out(kTokens * kHeads * kV32.d_v);
  std::vector<std::byte> pages(page_bytes(CacheFormat::kV32Fp8, kTokens));
  std::vector<int64_t> slots(kTokens);
  std::vector<int32_t> lists(kTokens * kTokens);
  for (int64_t t = 0; t < kTokens; ++t) slots[t] = t;
  for (size_t i = 0; i < lists.size(); ++i) lists[i] = static_cast<int32_t>(i % kTokens);
  const Cache cache{.data = pages.data(), .pages = 1, .page = kTokens};
  write({.kv = tensor(kv.data(), {kTokens, kV32.d_qk}),
         .slots = tensor(slots.data(), {kTokens}),
         .cache = cache});
  AttendArgs args{.q = tensor(q.data(), {kTokens, kHeads, kV32.d_qk}),
                  .scale = 0.01f,
                  .out = tensor(out.data(), {kTokens, kHeads, kV32.d_v})};
  args.lists[0] = {.cache = cache, .indices = tensor(lists.data(), {kTokens, kTokens})};
  attend(args);
  return out[0].bits;
}
