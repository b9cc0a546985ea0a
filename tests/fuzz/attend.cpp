// attend: output, lse and max logit within the accuracy bar, over caches in which everything that
// must not be read is NaN.
#include "winnow/attend.h"

#include "target.h"
#include "winnow/write.h"

namespace winnow::testing {
namespace {

constexpr float kSigma = 0.1f, kMost = 3.5f * kSigma;  // of the records' values

// A cache in which the slots of odd pages are NaN and those of even pages hold records.
struct FuzzCache {
  int32_t page;
  int64_t pages;
  Guarded<uint8_t> bytes;
  Cache view;
  std::vector<int32_t> good;  // slots that hold records

  FuzzCache(Source& s, const Model& model, CacheFormat format)
      : page(chance(s, 95) ? draw32(s, 1, 3) : page_size(s)),
        pages(draw(s, 1, 3)),
        bytes(pages * page_bytes(format, page), 0xff),
        view{.data = bytes.data(), .format = format, .pages = pages, .page = page} {
    std::vector<int64_t> slots;
    for (int32_t slot = 0; slot < pages * page; ++slot)
      if (slot / page % 2 == 0) {
        good.push_back(slot);
        slots.push_back(slot);
      }
    const auto n = static_cast<int64_t>(slots.size());
    std::vector<bf16> kv(n * model.d_qk);
    for (bf16& x : kv) x = to_bf16(s.normal() * kSigma);
    write({.kv = tensor(kv.data(), {n, model.d_qk}),
           .slots = tensor(slots.data(), {n}),
           .cache = view,
           .scale = format == model.fp8 ? ScaleMode::kPow2 : ScaleMode::kDefault});
  }
};

// One list over a cache: slots, or ids with a block table. Entries behind the length, and pages
// that only hostile table entries name, are NaN: who reads them shows it.
struct FuzzList {
  FuzzCache cache;
  int64_t width, R, W;
  Guarded<int32_t> lengths, table, entries;
  KvList view;

  FuzzList(Source& s, const Model& model, int64_t T, int64_t requests)
      : cache(s, model, chance(s, 60) ? model.fp8 : model.bf16),
        width(chance(s, 95) ? draw(s, 0, 9) : draw(s, 0, 150)),
        R(requests),
        W(draw(s, 1, 6)),
        lengths(indices(s, T, width + 1, 20)),
        table(R * W),
        entries(T * width) {
    const bool logical = chance(s, 40), with_lengths = chance(s, 60);
    const int64_t capacity = cache.pages * cache.page;
    for (int32_t& t : table) {
      t = index_for(s, cache.pages, 15);
      if (t >= 0 && t < cache.pages) t = t / 2 * 2;
    }
    for (int64_t i = 0; i < T * width; ++i) {
      const int64_t length = with_lengths ? lengths[i / width] : width;
      int32_t& e = entries[i];
      e = index_for(s, logical ? W * cache.page : capacity, 15);
      if (logical || e < 0 || e >= capacity) continue;
      e = cache.good[e % cache.good.size()];
      if (i % width >= length && cache.pages > 1) e = cache.page;  // the first slot that is NaN
    }
    view = {.cache = cache.view, .indices = tensor(entries.data(), {T, width})};
    if (with_lengths) view.lengths = tensor(lengths.data(), {T});
    if (logical) view.block_table = tensor(table.data(), {R, W});
  }
};

// On Hopper a logit is off by up to 2^-10 of scale * sum |q_i K_i| (attend.h).
double device_rounding(const AttendArgs& a) {
  const auto* q = static_cast<const bf16*>(a.q.data);
  double most = 0;
  for (int64_t row = 0; row < a.q.shape[0] * a.q.shape[1]; ++row) {
    double sum = 0;
    for (int64_t i = 0; i < a.q.shape[2]; ++i)
      sum += std::fabs(to_float(q[row * a.q.shape[2] + i]));
    most = std::max(most, sum);
  }
  return 0x1p-10 * a.scale * most * kMost;
}

// Calls every kernel and compares its three outputs with the reference's.
void expect_right(AttendArgs a, const Model& model) {
  const int64_t T = a.q.shape[0], H = a.q.shape[1];
  // |q| and |K| are about sqrt(d) long: a logit's fp32 sum of d terms walks sqrt(d) 2^-24 of that.
  tools::Bar lse_bar = tools::kDecodeLse;
  lse_bar.absolute = model.d_qk * 0x1p-24 * a.scale * std::sqrt(model.d_qk);
  std::vector<bf16> want_out;
  std::vector<float> want_lse, want_max;
  for (const Candidate& kernel : candidates("attend")) {
    Guarded<bf16> out(T * H * model.d_v);
    Guarded<float> lse(T * H), max_logit(T * H);
    a.out = tensor(out.data(), {T, H, model.d_v});
    a.lse = tensor(lse.data(), {T, H});
    a.max_logit = tensor(max_logit.data(), {T, H});
    a.target = kernel.target();
    if (kernel.cuda) lse_bar.absolute += device_rounding(a);
    const DeviceWorkspace workspace(a.target.device, attend_workspace_bytes(a));
    a.workspace = {static_cast<std::byte*>(workspace.data()), workspace.size()};
    attend(a);
    finish(kernel);
    if (kernel.name == "reference") {
      want_out = out.values();
      want_lse = lse.values();
      want_max = max_logit.values();
    }
    expect_close(kernel.name + " out", a.out, want_out, kOutBar);
    expect_close(kernel.name + " lse", a.lse, want_lse, lse_bar);
    expect_close(kernel.name + " max_logit", a.max_logit, want_max, lse_bar);
  }
}

void run(Source& s) {
  const Model& model = chance(s, 50) ? kV32 : kV4;
  const int64_t T = chance(s, 90) ? draw(s, 0, 2) : draw(s, 0, 5), R = draw(s, 1, 3);
  const int64_t H = chance(s, 98) ? draw(s, 1, 2) : draw(s, 3, 128);
  std::vector<FuzzList> lists;
  lists.reserve(2);
  for (int64_t n = draw(s, 1, model.lists); n > 0; --n) lists.emplace_back(s, model, T, R);
  Guarded<bf16> q = normals(s, T * H * model.d_qk);
  Guarded<float> sink(H);
  for (float& x : sink) x = chance(s, 10) ? -INFINITY : s.normal();
  auto requests = indices(s, T, R);
  AttendArgs a{.q = tensor(q.data(), {T, H, model.d_qk}),
               .requests = tensor(requests.data(), {T}),
               .scale = 1 / std::sqrt(static_cast<float>(model.d_qk)),
               .empty_lse_negative = chance(s, 50)};
  for (size_t l = 0; l < lists.size(); ++l) a.lists[l] = lists[l].view;
  if (chance(s, 50)) a.sink = tensor(sink.data(), {H});
  expect_right(a, model);
}

const FuzzTarget attend_target{"attend", 1, run};

}  // namespace
}  // namespace winnow::testing
