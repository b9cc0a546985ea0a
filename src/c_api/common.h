// What the C functions share: the guard that turns exceptions into a status, and the way in for
// views. Values a C caller can get wrong that the C++ types rule out (null structs, sizes, ranks,
// enumerators) are checked here; everything else is the stage's own business.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>

#include "core/check.h"
#include "winnow/plan.h"
#include "winnow/tensor.h"
#include "winnow/winnow_c.h"

namespace winnow::internal::c_api {
class CallersRanks;
}

struct winnow_plan {
  winnow_plan(winnow::Plan plan, std::unique_ptr<winnow::internal::c_api::CallersRanks> comm,
              std::unique_ptr<winnow::internal::c_api::CallersRanks> control);
  ~winnow_plan();
  // Before the plan, which uses them.
  std::unique_ptr<winnow::internal::c_api::CallersRanks> comm, control;
  winnow::Plan plan;
};

namespace winnow::internal::c_api {

// An argument struct in the versions that were published, smallest first: the sizes it had, and
// what its members are where a caller's struct is too old to have them. A new member goes to the
// end, not into the padding that the last size may end with, and adds a size here.
template <class T>
struct Published;

#define WINNOW_PUBLISHED(type, init, ...)                         \
  template <>                                                     \
  struct Published<type> {                                        \
    static constexpr const char* kMacro = #init;                  \
    static constexpr size_t kSizes[] = {__VA_ARGS__};             \
    static_assert(kSizes[std::size(kSizes) - 1] == sizeof(type)); \
    static type defaults() { return init; }                       \
  }
// Since 0.1:
WINNOW_PUBLISHED(winnow_plan_options, WINNOW_PLAN_OPTIONS_INIT, 128, 160, 168, 176);
WINNOW_PUBLISHED(winnow_batch, WINNOW_BATCH_INIT, 48);
WINNOW_PUBLISHED(winnow_route_args, WINNOW_ROUTE_ARGS_INIT, 40);
WINNOW_PUBLISHED(winnow_v4_chunk_args, WINNOW_V4_CHUNK_ARGS_INIT, 64);
WINNOW_PUBLISHED(winnow_compressed_slots_args, WINNOW_COMPRESSED_SLOTS_ARGS_INIT, 376, 392);
WINNOW_PUBLISHED(winnow_c128a_lists_args, WINNOW_C128A_LISTS_ARGS_INIT, 464, 480);
WINNOW_PUBLISHED(winnow_window_lists_args, WINNOW_WINDOW_LISTS_ARGS_INIT, 456, 472);
WINNOW_PUBLISHED(winnow_combined_lists_args, WINNOW_COMBINED_LISTS_ARGS_INIT, 624);
WINNOW_PUBLISHED(winnow_write_args, WINNOW_WRITE_ARGS_INIT, 328, 688);
WINNOW_PUBLISHED(winnow_norm_args, WINNOW_NORM_ARGS_INIT, 704);
WINNOW_PUBLISHED(winnow_rotate_args, WINNOW_ROTATE_ARGS_INIT, 368, 456);
WINNOW_PUBLISHED(winnow_rope_table_args, WINNOW_ROPE_TABLE_ARGS_INIT, 152);
WINNOW_PUBLISHED(winnow_prepare_query_args, WINNOW_PREPARE_QUERY_ARGS_INIT, 544);
WINNOW_PUBLISHED(winnow_index_query_args, WINNOW_INDEX_QUERY_ARGS_INIT, 544);
WINNOW_PUBLISHED(winnow_prepare_queries_args, WINNOW_PREPARE_QUERIES_ARGS_INIT, 48);
WINNOW_PUBLISHED(winnow_norm_write_args, WINNOW_NORM_WRITE_ARGS_INIT, 56);
WINNOW_PUBLISHED(winnow_compress_args, WINNOW_COMPRESS_ARGS_INIT, 1016);
WINNOW_PUBLISHED(winnow_gather_args, WINNOW_GATHER_ARGS_INIT, 480);
WINNOW_PUBLISHED(winnow_join_args, WINNOW_JOIN_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_quantize_args, WINNOW_QUANTIZE_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_score_args, WINNOW_SCORE_ARGS_INIT, 808, 816);
WINNOW_PUBLISHED(winnow_score_select_args, WINNOW_SCORE_SELECT_ARGS_INIT, 120, 288, 368);
WINNOW_PUBLISHED(winnow_select_args, WINNOW_SELECT_ARGS_INIT, 368, 536, 616);
WINNOW_PUBLISHED(winnow_communicator, WINNOW_COMMUNICATOR_INIT, 72);
WINNOW_PUBLISHED(winnow_cut_args, WINNOW_CUT_ARGS_INIT, 488);
WINNOW_PUBLISHED(winnow_combine_args, WINNOW_COMBINE_ARGS_INIT, 472);
WINNOW_PUBLISHED(winnow_gather_prefix_args, WINNOW_GATHER_PREFIX_ARGS_INIT, 304);
WINNOW_PUBLISHED(winnow_locate_args, WINNOW_LOCATE_ARGS_INIT, 656);
WINNOW_PUBLISHED(winnow_attend_args, WINNOW_ATTEND_ARGS_INIT, 1200, 1208);
WINNOW_PUBLISHED(winnow_mha_args, WINNOW_MHA_ARGS_INIT, 1008);
WINNOW_PUBLISHED(winnow_topk_mask_args, WINNOW_TOPK_MASK_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_merge_args, WINNOW_MERGE_ARGS_INIT, 432);
WINNOW_PUBLISHED(winnow_dequantize_weight_args, WINNOW_DEQUANTIZE_WEIGHT_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_split_kv_b_args, WINNOW_SPLIT_KV_B_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_absorb_query_args, WINNOW_ABSORB_QUERY_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_project_output_args, WINNOW_PROJECT_OUTPUT_ARGS_INIT, 272);
WINNOW_PUBLISHED(winnow_decompress_args, WINNOW_DECOMPRESS_ARGS_INIT, 432);
WINNOW_PUBLISHED(winnow_pipeline_args, WINNOW_PIPELINE_ARGS_INIT, 1384, 3056, 3072, 3320);

// Views of one call; names stage and argument when one is not a view at all.
class In {
 public:
  explicit In(const char* stage) : check_(stage) {}

  Tensor operator()(const winnow_tensor& t, const char* argument) const;
  Cache operator()(const winnow_cache& c, const char* argument) const;
  Target operator()(const winnow_target& t) const;
  std::span<const int32_t> operator()(const winnow_ints& v, const char* argument) const;
  // `count` values to be written at `out`.
  template <class T>
  std::span<T> out(T* out, int64_t count, const char* argument) const {
    check_.range(count, argument, 0, INT64_MAX / static_cast<int64_t>(sizeof(T)));
    check_.that(out != nullptr || count == 0, argument, "data", "a null pointer");
    return {out, static_cast<size_t>(count)};
  }
  // An enumerator, by its number; `last` is the largest. The name is put together only to fail.
  template <class E>
  E choice(int32_t value, const char* argument, E last, const char* member = "") const {
    if (value < 0 || value > static_cast<int32_t>(last))
      check_.range(value, std::string(cat(argument, member)).c_str(), 0,
                   static_cast<int32_t>(last));
    return static_cast<E>(value);
  }
  template <class T>
  T& given(T* pointer, const char* argument) const {
    check_.that(pointer != nullptr, argument, "a pointer", "null");
    return *pointer;
  }
  // An argument struct of any published size; members behind its end take their defaults.
  template <class T>
  T sized(const T* args, const char* name = "args") const {
    T own = Published<T>::defaults();
    std::memcpy(&own, args, size_of(args, name));
    own.struct_size = sizeof(T);
    return own;
  }
  // The size that the caller's struct says it has, which is a published one.
  template <class T>
  size_t size_of(const T* args, const char* name = "args") const {
    size_t size = 0;
    std::memcpy(&size, &given(args, name), sizeof(size));
    const auto& sizes = Published<T>::kSizes;
    check_.that(std::find(std::begin(sizes), std::end(sizes), size) != std::end(sizes),
                "struct_size", cat(sizeof(T), ", which ", Published<T>::kMacro, " sets"),
                cat(size));
    return size;
  }
  static const Plan* plan(const winnow_plan* p) { return p ? &p->plan : nullptr; }
  static std::span<std::byte> bytes(void* data, size_t size) {
    return {static_cast<std::byte*>(data), data ? size : 0};
  }
  const Check& check() const { return check_; }

 private:
  Check check_;
};

inline Shard shard_of(const winnow_shard& s) { return {s.world, s.rank, s.interleave}; }

// The one place where exceptions end: keeps the message of the current one for this thread.
winnow_status failed() noexcept;

// Runs body(In), or records why it could not.
template <class F>
winnow_status guarded(const char* stage, F&& body) noexcept {
  try {
    body(In(stage));
    return WINNOW_OK;
  } catch (...) {
    return failed();
  }
}

// The same for calls of one argument struct: body(args, In).
template <class T, class F>
winnow_status guarded(const char* stage, const T* args, F&& body) noexcept {
  return guarded(stage, [&](const In& in) { body(in.sized(args), in); });
}

}  // namespace winnow::internal::c_api
