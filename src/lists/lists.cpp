// V4's index lists: checks the calls, chooses the kernel.
#include "winnow/lists.h"

#include "core/arithmetic.h"
#include "core/check.h"
#include "lists/kernel.h"
#include "winnow/plan.h"

namespace winnow {

namespace internal::lists {

std::span<const ListsKernel> kernels() {
  static constexpr ListsKernel table[] = {
#ifdef WINNOW_WITH_CUDA
      {{"sm90", DeviceKind::kCuda, false, internal::cuda::missing},
       nullptr,
       sm90::slots,
       sm90::runs,
       sm90::combined},
#endif
      {{"simd", DeviceKind::kCpu, false, detail::any_machine},
       nullptr,
       simd::slots,
       simd::runs,
       simd::combined},
      {{"reference", DeviceKind::kCpu, true, detail::any_machine},
       nullptr,
       reference::slots,
       reference::runs,
       reference::combined},
  };
  return table;
}

namespace {

const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data); }

Device device_of(const Plan* plan, const Target& target) {
  return plan ? plan->device(target) : target.device;
}

// Chooses the kernel and runs the member function requested.
template <class Params>
void run_list(const Plan* plan, const Target& target,
              void (*ListsKernel::*function)(const Params&) noexcept, const Params& p) {
  const ListsKernel& kernel = plan ? *pick<ListsKernel>(plan->usable(Stage::kLists), {})
                                   : choose("lists", kernels(), Shape{}, target);
  Kernel<Shape, Params> one{};  // the member as a kernel of its own, so that launches are checked
  one.name = kernel.name;
  one.device = kernel.device;
  one.run = kernel.*function;
  run("lists", one, p);
}

// Requests are needed with a table only; whoever has one checks that they are there.
Tokens tokens_of(const Check& check, const Tensor& positions, const Tensor& requests) {
  check.tensor(positions, "positions", DType::kI32, {Check::kAny});
  if (requests) check.tensor(requests, "requests", DType::kI32, {positions.shape[0]});
  return {positions.shape[0], ints(positions), ints(requests)};
}

// Table entries are data: kernels check each against `pages`. Slots of it are below `most`.
struct Pages {
  int32_t page;
  int64_t pages, most;
};
Table table_of(const Check& check, const Tensor& t, const Pages& cache) {
  check.tensor(t, "block_table", DType::kI32, {Check::kAny, Check::kAny});
  check.range(cache.page, "page", 1, INT32_MAX);
  check.pages(cache.pages, t, cache.most / cache.page);
  return {ints(t), t.stride[0], t.shape[0], t.shape[1], cache.page, cache.pages};
}

Shard shard_of(const Check& check, const Shard& shard) {
  check.range(shard.interleave, "shard.interleave", 1, INT32_MAX);
  check.range(shard.world, "shard.world", 1, INT32_MAX);
  check.range(shard.rank, "shard.rank", 0, shard.world - 1);
  return shard;
}

// What rows are written to, and what they are made of.
struct Outputs {
  const Tensor &lists, &lengths, &positions, &requests, &block_table;
};
// Rows are written up to their own width, `least` columns or more, whatever their stride.
Rows rows_of(const Check& check, const Outputs& o, int64_t tokens, int64_t least) {
  check.output_rows(o.lists, "lists", DType::kI32, {tokens, Check::kAny});
  check.range(o.lists.shape[1], "lists (columns)", least, INT32_MAX);
  check.output_rows(o.lengths, "lengths", DType::kI32, {tokens});
  check.apart(
      {{o.lists, "lists"}, {o.lengths, "lengths"}},
      {{o.positions, "positions"}, {o.requests, "requests"}, {o.block_table, "block_table"}});
  return {static_cast<int32_t*>(o.lists.data), o.lists.stride[0], o.lists.shape[1],
          static_cast<int32_t*>(o.lengths.data)};
}

}  // namespace
}  // namespace internal::lists

void compressed_slots(const CompressedSlotsArgs& a) try {
  const Check check("compressed_slots");
  internal::lists::SlotsParams p;
  p.tokens = internal::lists::tokens_of(check, a.positions, a.requests);
  check.tensor(a.requests, "requests", DType::kI32, {p.tokens.count});
  p.table = internal::lists::table_of(check, a.block_table, {a.page, a.pages, INT64_MAX});
  p.ratio = static_cast<int32_t>(check.range(a.ratio, "ratio", 1, INT32_MAX));
  check.output_rows(a.slots, "slots", DType::kI64, {Check::kAny});
  check.apart(
      {{a.slots, "slots"}},
      {{a.positions, "positions"}, {a.requests, "requests"}, {a.block_table, "block_table"}});
  p.slot_count = a.slots.shape[0];
  check.that(p.slot_count >= p.tokens.count, "slots", cat("at least ", p.tokens.count, " entries"),
             cat(p.slot_count));
  p.slots = static_cast<int64_t*>(a.slots.data);
  p.shard = internal::lists::shard_of(check, a.shard);
  p.device = internal::lists::device_of(a.plan, a.target);
  internal::lists::run_list(a.plan, a.target, &internal::lists::ListsKernel::slots, p);
} catch (const std::bad_alloc&) {
  out_of_memory("compressed_slots");
}

void c128a_lists(const C128aListsArgs& a) try {
  const Check check("c128a_lists");
  internal::lists::RunParams p;
  p.tokens = internal::lists::tokens_of(check, a.positions, a.requests);
  p.slot_rows = check.range(a.decode_tokens, "decode_tokens", 0, p.tokens.count);
  check.tensor(a.requests, "requests", DType::kI32, {p.tokens.count});
  // Lists are int32.
  p.table = internal::lists::table_of(check, a.block_table, {a.page, a.pages, INT32_MAX});
  p.ratio = static_cast<int32_t>(check.range(a.ratio, "ratio", 1, INT32_MAX));
  p.out = internal::lists::rows_of(
      check, {a.lists, a.lengths, a.positions, a.requests, a.block_table}, p.tokens.count, 0);
  p.shard = internal::lists::shard_of(check, a.shard);
  p.device = internal::lists::device_of(a.plan, a.target);
  internal::lists::run_list(a.plan, a.target, &internal::lists::ListsKernel::runs, p);
} catch (const std::bad_alloc&) {
  out_of_memory("c128a_lists");
}

int32_t c128a_width(int32_t max_position, int32_t ratio) try {
  const Check check("c128a_width");
  check.range(max_position, "max_position", -1, INT32_MAX);
  check.range(ratio, "ratio", 1, INT32_MAX);
  const int64_t width = round_up((int64_t{max_position} + 1) / ratio, 128);
  check.that(width <= INT32_MAX, "max_position", "a width within int32", cat(max_position));
  return static_cast<int32_t>(width);
} catch (const std::bad_alloc&) {
  out_of_memory("c128a_width");
}

void window_lists(const WindowListsArgs& a) try {
  const Check check("window_lists");
  internal::lists::RunParams p;
  p.tokens = internal::lists::tokens_of(check, a.positions, a.requests);
  if (a.block_table) {
    check.tensor(a.requests, "requests", DType::kI32, {p.tokens.count});
    // Lists are int32.
    p.table = internal::lists::table_of(check, a.block_table, {a.page, a.pages, INT32_MAX});
    p.slot_rows = p.tokens.count;
  }
  p.window = static_cast<int32_t>(check.range(a.window, "window", 1, INT32_MAX));
  p.out =
      internal::lists::rows_of(check, {a.lists, a.lengths, a.positions, a.requests, a.block_table},
                               p.tokens.count, a.window);
  p.shard = internal::lists::shard_of(check, a.shard);
  p.device = internal::lists::device_of(a.plan, a.target);
  internal::lists::run_list(a.plan, a.target, &internal::lists::ListsKernel::runs, p);
} catch (const std::bad_alloc&) {
  out_of_memory("window_lists");
}

// The width is padded to 128 as a whole, so that readers may take blocks of 128 columns.
void combined_lists(const CombinedListsArgs& a) try {
  const Check check("combined_lists");
  internal::lists::CombinedParams p;
  p.tokens = internal::lists::tokens_of(check, a.positions, a.requests);
  const int64_t tokens = p.tokens.count;
  check.tensor(a.requests, "requests", DType::kI32, {tokens});
  check.tensor(a.topk, "topk", DType::kI32, {tokens, Check::kAny});
  check.tensor(a.seq_lens, "seq_lens", DType::kI32, {Check::kAny});
  check.tensor(a.gather_lens, "gather_lens", DType::kI32, {a.seq_lens.shape[0]});
  p.topk = internal::lists::ints(a.topk);
  p.topk_stride = a.topk.stride[0];
  p.topk_width = check.range(a.topk.shape[1], "topk (columns)", 0, INT32_MAX / 2);
  p.first_request = a.first_request;
  p.requests = a.seq_lens.shape[0];
  p.seq_lens = internal::lists::ints(a.seq_lens);
  p.gather_lens = internal::lists::ints(a.gather_lens);
  p.ratio = static_cast<int32_t>(check.range(a.ratio, "ratio", 1, INT32_MAX));
  p.window = static_cast<int32_t>(check.range(a.window, "window", 0, INT32_MAX / 2));
  p.rows = static_cast<int32_t>(check.range(a.rows, "rows", 0, INT32_MAX));
  p.compressed = static_cast<int32_t>(check.range(a.compressed, "compressed", 0, a.rows));
  p.out = internal::lists::rows_of(check, {a.lists, a.lengths, a.positions, a.requests, {}}, tokens,
                                   round_up(p.topk_width + p.window, 128));
  check.apart({{a.lists, "lists"}, {a.lengths, "lengths"}},
              {{a.topk, "topk"}, {a.seq_lens, "seq_lens"}, {a.gather_lens, "gather_lens"}});
  p.device = internal::lists::device_of(a.plan, a.target);
  internal::lists::run_list(a.plan, a.target, &internal::lists::ListsKernel::combined, p);
} catch (const std::bad_alloc&) {
  out_of_memory("combined_lists");
}

}  // namespace winnow
