// V4's index lists in C.
#include "winnow/lists.h"

#include "c_api/common.h"

using winnow::internal::c_api::guarded;
using winnow::internal::c_api::In;
using winnow::internal::c_api::shard_of;

extern "C" {

winnow_status winnow_compressed_slots(const winnow_compressed_slots_args* args) {
  return guarded("compressed_slots", args, [](const winnow_compressed_slots_args& a, const In& in) {
    winnow::compressed_slots({.plan = in.plan(a.plan),
                              .positions = in(a.positions, "positions"),
                              .requests = in(a.requests, "requests"),
                              .block_table = in(a.block_table, "block_table"),
                              .ratio = a.ratio,
                              .page = a.page,
                              .pages = a.pages,
                              .slots = in(a.slots, "slots"),
                              .target = in(a.target),
                              .shard = shard_of(a.shard)});
  });
}

winnow_status winnow_c128a_lists(const winnow_c128a_lists_args* args) {
  return guarded("c128a_lists", args, [](const winnow_c128a_lists_args& a, const In& in) {
    winnow::c128a_lists({.plan = in.plan(a.plan),
                         .positions = in(a.positions, "positions"),
                         .requests = in(a.requests, "requests"),
                         .block_table = in(a.block_table, "block_table"),
                         .ratio = a.ratio,
                         .page = a.page,
                         .pages = a.pages,
                         .decode_tokens = a.decode_tokens,
                         .lists = in(a.lists, "lists"),
                         .lengths = in(a.lengths, "lengths"),
                         .target = in(a.target),
                         .shard = shard_of(a.shard)});
  });
}

winnow_status winnow_c128a_width(int32_t max_position, int32_t ratio, int32_t* out) {
  return guarded("c128a_width", [&](const In& in) {
    in.given(out, "out") = winnow::c128a_width(max_position, ratio);
  });
}

winnow_status winnow_window_lists(const winnow_window_lists_args* args) {
  return guarded("window_lists", args, [](const winnow_window_lists_args& a, const In& in) {
    winnow::window_lists({.plan = in.plan(a.plan),
                          .positions = in(a.positions, "positions"),
                          .requests = in(a.requests, "requests"),
                          .block_table = in(a.block_table, "block_table"),
                          .window = a.window,
                          .page = a.page,
                          .pages = a.pages,
                          .lists = in(a.lists, "lists"),
                          .lengths = in(a.lengths, "lengths"),
                          .target = in(a.target),
                          .shard = shard_of(a.shard)});
  });
}

winnow_status winnow_combined_lists(const winnow_combined_lists_args* args) {
  return guarded("combined_lists", args, [](const winnow_combined_lists_args& a, const In& in) {
    winnow::combined_lists({.plan = in.plan(a.plan),
                            .topk = in(a.topk, "topk"),
                            .positions = in(a.positions, "positions"),
                            .requests = in(a.requests, "requests"),
                            .first_request = a.first_request,
                            .seq_lens = in(a.seq_lens, "seq_lens"),
                            .gather_lens = in(a.gather_lens, "gather_lens"),
                            .ratio = a.ratio,
                            .window = a.window,
                            .compressed = a.compressed,
                            .rows = a.rows,
                            .lists = in(a.lists, "lists"),
                            .lengths = in(a.lengths, "lengths"),
                            .target = in(a.target)});
  });
}

}  // extern "C"
