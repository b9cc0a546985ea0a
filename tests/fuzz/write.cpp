// write and gather: the bytes of the whole cache, and gathered rows bit for bit.
#include "winnow/write.h"

#include <numeric>

#include "model/index.h"
#include "target.h"
#include "winnow/error.h"

namespace winnow::testing {
namespace {

struct Written {
  CacheFormat format;
  int32_t page;
  int64_t pages, bytes;

  explicit Written(Source& s)
      : format(cache_formats()[draw(s, 0, std::ssize(cache_formats()) - 1)]),
        page(chance(s, 90) ? draw32(s, 1, 4) : page_size(s)),
        pages(draw(s, 1, 3)),
        bytes(pages * page_bytes(format, page)) {}
  Cache cache(void* data) const {
    return {.data = data, .format = format, .pages = pages, .page = page};
  }
};

// Any bits are a value: NaN, infinities, subnormals.
bf16 any_value(Source& s) {
  const uint64_t r = s();
  if (r % 16 < 4) return {static_cast<uint16_t>(r >> 32)};
  return to_bf16(std::ldexp(s.normal(), static_cast<int>(r >> 8 & 63) - 40));
}

// On the CPU a slot behind the cache is an Error that leaves the cache as it was.
void expect_refused(WriteArgs a, Guarded<uint8_t>& bytes) {
  if (compared == Compared::kCuda) return;
  for (const Candidate& kernel : candidates("write")) {
    bytes.poison();
    a.target = kernel.target();
    EXPECT_THROW(write(a), Error) << kernel.name;
    EXPECT_EQ(bytes.values(), std::vector<uint8_t>(bytes.size(), Guarded<uint8_t>::kPoison));
  }
}

void write_any(Source& s) {
  const Written w(s);
  const int64_t T = chance(s, 90) ? draw(s, 0, 4) : draw(s, 0, 12), dim = record_dim(w.format);
  const int64_t stride = dim + (chance(s, 30) ? draw(s, 0, 9) : 0);
  const int rope = is_index(w.format) ? 0 : 64;
  const bool split = rope > 0 && chance(s, 30);
  // Different slots in any order; some tokens have none.
  std::vector<int64_t> all(std::max(w.pages * w.page, T), -1);
  std::iota(all.begin(), all.begin() + w.pages * w.page, 0);
  std::shuffle(all.begin(), all.end(), s);
  Guarded<int64_t> slots(T);
  const int64_t skipped[] = {-1, -2, INT64_MIN, INT32_MIN};
  for (int64_t t = 0; t < T; ++t) slots[t] = chance(s, 15) ? skipped[draw(s, 0, 3)] : all[t];
  Guarded<bf16> kv(T * stride);
  for (bf16& x : kv) x = any_value(s);
  Guarded<uint8_t> bytes(w.bytes);
  const int last = w.format == CacheFormat::kV4Fp8 ? 3 : w.format == CacheFormat::kV4Bf16 ? 0 : 2;
  WriteArgs a{.kv = tensor(kv.data(), {T, split ? dim - rope : dim}, {stride, 1}),
              .slots = tensor(slots.data(), {T}),
              .cache = w.cache(bytes.data()),
              .scale = static_cast<ScaleMode>(draw(s, 0, last))};
  if (w.format == CacheFormat::kV4Fp8 && a.scale == ScaleMode::kAmax) a.scale = ScaleMode::kPow2;
  if (split) a.rope = tensor(kv.data() + dim - rope, {T, rope}, {stride, 1});
  if (T > 0 && chance(s, 10)) {
    slots[draw(s, 0, T - 1)] = chance(s, 50) ? w.pages * w.page : INT64_MAX;
    expect_refused(a, bytes);
    return;
  }
  expect_exact("write", write, a, bytes);
}

void gather_any(Source& s) {
  const Written w(s);
  if (is_index(w.format)) return;
  const int64_t R = draw(s, 0, 4), W = draw(s, 0, 5),
                N = chance(s, 90) ? draw(s, 0, 12) : draw(s, 0, 40);
  const int64_t dim = record_dim(w.format);
  auto table = indices(s, R * W, w.pages), starts = indices(s, R, W * w.page + 1, 15);
  Guarded<int32_t> lengths(R), out_starts(R);
  const bool placed = chance(s, 40);
  for (int64_t r = 0; r < R; ++r) {
    // Requests that cover a row twice may end with either: places of ten rows keep them apart.
    out_starts[r] = static_cast<int32_t>(10 * r);
    lengths[r] = placed || chance(s, 85) ? draw32(s, 0, 10) : index_for(s, 0, 100);
    if (placed && r + 1 == R && chance(s, 20))
      out_starts[r] = chance(s, 50) ? INT32_MAX : INT32_MIN;
  }
  Guarded<uint8_t> bytes(w.bytes);
  for (uint8_t& b : bytes) b = static_cast<uint8_t>(s());
  Guarded<bf16> out(N * dim);
  GatherArgs a{.cache = w.cache(bytes.data()),
               .block_table = tensor(table.data(), {R, W}),
               .lengths = tensor(lengths.data(), {R}),
               .out = tensor(out.data(), {N, dim})};
  if (chance(s, 60)) a.starts = tensor(starts.data(), {R});
  if (placed) a.out_starts = tensor(out_starts.data(), {R});
  std::vector<bf16> want;
  for (const Candidate& kernel : candidates("gather")) {
    out.poison();
    a.target = kernel.target();
    gather(a);
    finish(kernel);
    if (kernel.name == "reference") want = out.values();
    // Of a NaN the kind may differ.
    for (size_t i = 0; i < out.size(); ++i)
      if (out[i].bits != want[i].bits &&
          !(std::isnan(to_float(out[i])) && std::isnan(to_float(want[i])))) {
        ADD_FAILURE() << kernel.name << ": row " << i / dim << ", column " << i % dim << ": "
                      << out[i].bits << ", expected " << want[i].bits;
        return;
      }
  }
}

void run(Source& s) { chance(s, 50) ? write_any(s) : gather_any(s); }

const FuzzTarget write_target{"write", 5, run};

}  // namespace
}  // namespace winnow::testing
