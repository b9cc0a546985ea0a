// The C functions of the steps in front of the stages, and the pipeline, for c_calls.h.
#pragma once

#include "damaged_call.h"

namespace winnow::testing::c_calls {

inline winnow_rope rope(DamagedCall& c) {
  winnow_rope r{};
  r.table = c.in(WINNOW_F32, {4, 2, 32});
  return r;
}
inline void damage_rope(DamagedCall& c, winnow_rope& r) {
  c.tensors({&r.table});
  c.ints({&r.pairs, &r.slice});
}
inline winnow_norm_step norm_step(DamagedCall& c, int64_t width) {
  winnow_norm_step n{};
  n.kind = WINNOW_RMS_NORM;
  n.weight = c.in(WINNOW_F32, {width});
  n.bias = c.in(WINNOW_F32, {width});
  n.eps = 1e-6f;
  return n;
}
inline void damage_norm(DamagedCall& c, winnow_norm_step& n) {
  c.tensors({&n.weight, &n.bias});
  c.ints({&n.kind});
}

inline void norm_call(DamagedCall& c) {
  winnow_norm_args a = WINNOW_NORM_ARGS_INIT;
  int64_t width = 9;
  for (winnow_norm_rows& rows : a.rows) {
    rows.x = c.in(WINNOW_BF16, {3, width});
    rows.out = c.out(WINNOW_BF16, {3, width});
    rows.norm = norm_step(c, width);
    c.tensors({&rows.x, &rows.out});
    damage_norm(c, rows.norm);
    width = 5;
  }
  c.run(a, winnow_norm);
}

inline void rotate_call(DamagedCall& c) {
  winnow_rotate_args a = WINNOW_ROTATE_ARGS_INIT;
  a.x = c.in(WINNOW_BF16, {3, 2, 70});
  a.positions = c.in(WINNOW_I32, {3});
  a.rope = rope(c);
  a.out = c.out(WINNOW_BF16, {3, 2, 70});
  c.tensors({&a.x, &a.positions, &a.out});
  damage_rope(c, a.rope);
  c.run(a, winnow_rotate);
}

inline void rope_table_call(DamagedCall& c) {
  winnow_rope_table_args a = WINNOW_ROPE_TABLE_ARGS_INIT;
  a.factor = 4;
  a.original = 64;
  a.table = c.out(WINNOW_F32, {4, 2, 32});
  c.tensors({&a.table});
  c.longs({&a.original});
  c.run(a, winnow_rope_table);
}

inline void prepare_query_call(DamagedCall& c) {
  winnow_prepare_query_args a = WINNOW_PREPARE_QUERY_ARGS_INIT;
  a.q = c.in(WINNOW_BF16, {3, 2, 70});
  a.norm = norm_step(c, 70);
  a.positions = c.in(WINNOW_I32, {3});
  a.rope = rope(c);
  a.out = c.out(WINNOW_BF16, {3, 2, 70});
  c.tensors({&a.q, &a.positions, &a.out});
  damage_norm(c, a.norm);
  damage_rope(c, a.rope);
  c.run(a, winnow_prepare_query);
}

inline winnow_index_query_args index_query_args(DamagedCall& c) {
  winnow_index_query_args a = WINNOW_INDEX_QUERY_ARGS_INIT;
  a.q = c.in(WINNOW_BF16, {3, 2, 128});
  a.weights = c.in(WINNOW_F32, {3, 2});
  a.positions = c.in(WINNOW_I32, {3});
  a.rope = rope(c);
  a.hadamard = true;
  a.out = c.out(WINNOW_E4M3, {3, 2, 128});
  a.out_weights = c.out(WINNOW_F32, {3, 2});
  return a;
}
inline void damage_index_query(DamagedCall& c, winnow_index_query_args& a) {
  c.tensors({&a.q, &a.weights, &a.positions, &a.out, &a.out_weights});
  c.ints({&a.scale});
  damage_rope(c, a.rope);
}
inline void index_query_call(DamagedCall& c) {
  winnow_index_query_args a = index_query_args(c);
  damage_index_query(c, a);
  c.run(a, winnow_index_query);
}

// Both queries in one call; that of the indexer is damaged.
inline void prepare_queries_call(DamagedCall& c) {
  static thread_local winnow_prepare_queries_args both;
  both = WINNOW_PREPARE_QUERIES_ARGS_INIT;
  winnow_prepare_query_args query = WINNOW_PREPARE_QUERY_ARGS_INIT;
  query.q = c.in(WINNOW_BF16, {3, 2, 70});
  query.norm = norm_step(c, 70);
  query.positions = c.in(WINNOW_I32, {3});
  query.rope = rope(c);
  query.out = c.out(WINNOW_BF16, {3, 2, 70});
  winnow_index_query_args a = index_query_args(c);
  both.query = &query;
  both.index = &a;
  c.tensors({&query.q, &query.positions, &query.out});
  damage_norm(c, query.norm);
  damage_index_query(c, a);
  c.run(
      a, +[](const winnow_index_query_args*) { return winnow_prepare_queries(&both); });
}

inline void compress_call(DamagedCall& c) {
  winnow_compress_args a = WINNOW_COMPRESS_ARGS_INIT;
  a.ratio = 2;
  a.rows = c.in(WINNOW_F32, {3, 256});
  a.positions = c.in(WINNOW_I32, {3});
  a.requests = c.in(WINNOW_I32, {3});
  a.bias = c.in(WINNOW_F32, {2, 128});
  a.state_rows = c.out(WINNOW_F32, {4, 2, 256});
  a.state_table = c.in(WINNOW_I32, {2, 3});
  a.norm = norm_step(c, 128);
  a.rope = rope(c);
  a.slots = c.in(WINNOW_I64, {3});
  a.cache = c.cache(WINNOW_INDEX_KEYS, 4, 2, true);
  a.latent = c.out(WINNOW_BF16, {3, 128});
  c.tensors({&a.rows, &a.positions, &a.requests, &a.bias, &a.state_rows, &a.state_table, &a.slots,
             &a.latent});
  c.caches({&a.cache});
  c.ints({&a.ratio, &a.scale});
  damage_norm(c, a.norm);
  damage_rope(c, a.rope);
  c.run(a, winnow_compress);
}

inline winnow_write_args prologue_args(DamagedCall& c) {
  winnow_write_args a = WINNOW_WRITE_ARGS_INIT;
  a.kv = c.in(WINNOW_BF16, {3, 128});
  a.slots = c.in(WINNOW_I64, {3});
  a.cache = c.cache(WINNOW_INDEX_KEYS, 4, 2, true);
  a.prologue.norm = norm_step(c, 128);
  a.prologue.rope = rope(c);
  a.prologue.positions = c.in(WINNOW_I32, {3});
  a.prologue.hadamard = true;
  return a;
}
inline void damage_prologue(DamagedCall& c, winnow_write_args& a) {
  c.tensors({&a.kv, &a.rope, &a.slots, &a.prologue.positions});
  c.caches({&a.cache});
  c.ints({&a.scale});
  damage_norm(c, a.prologue.norm);
  damage_rope(c, a.prologue.rope);
}
inline void prologue_call(DamagedCall& c) {
  winnow_write_args a = prologue_args(c);
  damage_prologue(c, a);
  c.run(a, winnow_write);
}

// A norm and a write in one call; both are damaged.
inline void norm_write_call(DamagedCall& c) {
  static thread_local winnow_norm_write_args both;
  both = WINNOW_NORM_WRITE_ARGS_INIT;
  winnow_norm_args norm = WINNOW_NORM_ARGS_INIT;
  norm.rows[0].x = c.in(WINNOW_BF16, {3, 9});
  norm.rows[0].out = c.out(WINNOW_BF16, {3, 9});
  norm.rows[0].norm = norm_step(c, 9);
  winnow_write_args a = prologue_args(c);
  both.norm = &norm;
  both.write[c.choose(2)] = &a;
  c.tensors({&norm.rows[0].x, &norm.rows[0].out});
  damage_norm(c, norm.rows[0].norm);
  damage_prologue(c, a);
  c.run(
      a, +[](const winnow_write_args*) { return winnow_norm_write(&both); });
}

// Runs `call` with a plan of a small batch.
template <class F>
void with_any_plan(winnow_plan_options options, const F& call) {
  options.heads = 2;
  options.index_heads = 2;
  options.pages = 4;
  options.page = 4;
  options.max_requests = 2;
  options.max_tokens = 4;
  options.max_context = 12;
  const int32_t starts[] = {0, 1, 3}, lens[] = {9, 5};
  winnow_batch batch = WINNOW_BATCH_INIT;
  batch.query_starts = {starts, 3};
  batch.seq_lens = {lens, 2};
  winnow_plan* plan = nullptr;
  if (winnow_plan_create(&options, &plan) != WINNOW_OK) return;
  if (winnow_plan_refill(plan, &batch) == WINNOW_OK) call(plan);
  winnow_plan_destroy(plan);
}
// The same, with workspace for its pipeline.
template <class F>
void with_plan(const winnow_plan_options& options, const F& call) {
  with_any_plan(options, [&](const winnow_plan* plan) {
    size_t bytes = 0;
    if (winnow_pipeline_workspace_bytes(plan, &bytes) != WINNOW_OK) return;
    std::vector<std::byte> workspace(bytes);
    winnow_pipeline_args a = WINNOW_PIPELINE_ARGS_INIT;
    a.plan = plan;
    a.scale = 0.1f;
    a.workspace = workspace.data();
    a.workspace_bytes = workspace.size();
    call(a);
  });
}
inline void run_pipeline(DamagedCall& c, winnow_pipeline_args& a) {
  c.tensors({&a.kv, &a.slots, &a.block_table, &a.indexer.k, &a.indexer.slots,
             &a.indexer.block_table, &a.indexer.q, &a.indexer.weights, &a.q, &a.sink, &a.out,
             &a.lse, &a.compressed_kv, &a.compressed_slots, &a.compressed_table});
  c.caches({&a.cache, &a.indexer.keys, &a.compressed});
  c.run(a, winnow_pipeline);
}

// A layer of V3.2.
inline void pipeline_call(DamagedCall& c) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.format = WINNOW_V32_FP8;
  options.topk = 4;
  with_plan(options, [&](winnow_pipeline_args& a) {
    a.kv = c.in(WINNOW_BF16, {3, 576});
    a.slots = c.in(WINNOW_I64, {3});
    a.cache = c.cache(WINNOW_V32_FP8, 4, 4, true);
    a.block_table = c.in(WINNOW_I32, {2, 3});
    a.indexer.k = c.in(WINNOW_BF16, {3, 128});
    a.indexer.slots = c.in(WINNOW_I64, {3});
    a.indexer.keys = c.cache(WINNOW_INDEX_KEYS, 4, 4, true);
    a.indexer.block_table = c.in(WINNOW_I32, {2, 3});
    a.indexer.q = c.in(WINNOW_E4M3, {3, 2, 128});
    a.indexer.weights = c.in(WINNOW_F32, {3, 2});
    a.q = c.in(WINNOW_BF16, {3, 2, 576});
    a.out = c.out(WINNOW_BF16, {3, 2, 512});
    a.lse = c.out(WINNOW_F32, {3, 2});
    run_pipeline(c, a);
  });
}

inline winnow_compressor compressor(DamagedCall& c, int64_t width) {
  winnow_compressor s{};
  s.rows = c.in(WINNOW_F32, {3, 2 * width});
  s.gate = true;
  s.state_rows = c.out(WINNOW_F32, {4, 4, 2 * width});
  s.state_table = c.in(WINNOW_I32, {2, 3});
  s.norm = norm_step(c, width);
  return s;
}
inline void damage_compressor(DamagedCall& c, winnow_compressor& s) {
  c.tensors({&s.rows, &s.bias, &s.state_rows, &s.state_table});
  c.ints({&s.scale});
  damage_norm(c, s.norm);
}

// A layer of V4 from its projections on.
inline void steps_call(DamagedCall& c) {
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.model = "v4";
  options.format = WINNOW_V4_FP8;
  options.topk = 4;
  options.extra_topk = 2;
  options.ratio = 4;
  with_plan(options, [&](winnow_pipeline_args& a) {
    a.kv = c.in(WINNOW_BF16, {3, 512});
    a.slots = c.in(WINNOW_I64, {3});
    a.cache = c.cache(WINNOW_V4_FP8, 4, 4, true);
    a.block_table = c.in(WINNOW_I32, {2, 3});
    a.compressed = c.cache(WINNOW_V4_FP8, 4, 4, true);
    a.compressed_table = c.in(WINNOW_I32, {2, 1});
    a.indexer.keys = c.cache(WINNOW_INDEX_KEYS, 4, 4, true);
    a.indexer.block_table = c.in(WINNOW_I32, {2, 1});
    a.indexer.q = c.out(WINNOW_E4M3, {3, 2, 128});
    a.indexer.weights = c.out(WINNOW_F32, {3, 2});
    a.q = c.out(WINNOW_BF16, {3, 2, 512});  // prepared in place
    a.out = c.out(WINNOW_BF16, {3, 2, 512});
    a.steps.rope.table = c.in(WINNOW_F32, {12, 2, 32});
    a.steps.kv_norm = norm_step(c, 512);
    a.steps.states = compressor(c, 512);
    a.steps.index = compressor(c, 128);
    a.steps.index_q = c.in(WINNOW_BF16, {3, 2, 128});
    a.steps.index_weights = c.in(WINNOW_F32, {3, 2});
    a.steps.index_factor = 0.5f;
    damage_rope(c, a.steps.rope);
    damage_norm(c, a.steps.kv_norm);
    damage_norm(c, a.steps.q_norm);
    damage_compressor(c, a.steps.states);
    damage_compressor(c, a.steps.index);
    c.tensors({&a.steps.index_q, &a.steps.index_weights});
    c.ints({&a.steps.scale, &a.steps.index_scale});
    run_pipeline(c, a);
  });
}

// One of two ranks: the other one's bytes are what this one sends.
inline winnow_communicator mirror() {
  winnow_communicator comm = WINNOW_COMMUNICATOR_INIT;
  comm.size = 2;
  comm.name = "mirror";
  comm.takes_host = true;
  comm.exchange = [](void*, const void* send, void* recv, size_t bytes) {
    for (int i = 0; i < 2; ++i) std::memcpy(static_cast<std::byte*>(recv) + i * bytes, send, bytes);
    return 0;
  };
  comm.all_gather = [](void*, const void* send, void* recv, size_t bytes, void*) {
    for (int i = 0; i < 2; ++i) std::memcpy(static_cast<std::byte*>(recv) + i * bytes, send, bytes);
    return 0;
  };
  comm.all_to_all = [](void*, const void* send, void* recv, size_t bytes, void*) {
    std::memcpy(recv, send, 2 * bytes);
    return 0;
  };
  return comm;
}
inline void prefix_call(DamagedCall& c) {
  const winnow_communicator comm = mirror();
  winnow_plan_options options = WINNOW_PLAN_OPTIONS_INIT;
  options.format = WINNOW_V32_FP8;
  options.topk = 4;
  options.comm = &comm;
  options.spread = WINNOW_SPREAD_QUERIES;
  options.sharded = 1;
  with_any_plan(options, [&](const winnow_plan* plan) {
    winnow_gather_prefix_args a = WINNOW_GATHER_PREFIX_ARGS_INIT;
    if (winnow_gather_prefix_bytes(plan, &a.rows_bytes) != WINNOW_OK) return;
    std::vector<std::byte> rows(a.rows_bytes);
    a.plan = plan;
    a.cache = c.cache(WINNOW_V32_FP8, 4, 4);
    a.block_table = c.in(WINNOW_I32, {2, 3});
    a.keys = c.cache(WINNOW_INDEX_KEYS, 4, 4);
    a.key_table = c.in(WINNOW_I32, {2, 3});
    a.rows = rows.data();
    c.tensors({&a.block_table, &a.key_table});
    c.caches({&a.cache, &a.keys});
    c.run(a, winnow_gather_prefix);
  });
}

}  // namespace winnow::testing::c_calls
