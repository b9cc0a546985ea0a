// The verbs between a layer's projections and its stages, as calls on device memory (cuda_verb.h).
#pragma once

#include "cuda_verb.h"
#include "winnow/compress.h"
#include "winnow/norm_write.h"
#include "winnow/prepare_queries.h"
#include "winnow/rotate.h"

namespace winnow::testing {

inline constexpr int64_t kTurns = 300;  // positions of the tables

inline Rope random_rope(Verb& v) {
  return {.table = tensor(v.floats(kTurns * 64), {kTurns, 2, 32})};
}

// Some of them hostile.
inline int32_t* positions_of(Verb& v, int64_t tokens) { return v.ints(tokens, 0, kTurns - 1); }

inline NormArgs norm_args(Verb& v) {
  const int64_t t = 9;
  NormArgs a;
  for (int i = 0; i < 2; ++i) {
    const int64_t width = i == 0 ? 1536 : 512;
    a.rows[i] = {.x = tensor(v.bf16s(t * width), {t, width}),
                 .out = tensor(v.output<bf16>(t * width), {t, width}),
                 .norm = {.weight = tensor(v.floats(width), {width})}};
  }
  return a;
}

inline VerbPtr norm_verb() {
  auto v = std::make_unique<Verb>("norm");
  NormArgs a = norm_args(*v);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    norm(a);
  };
  return v;
}

// With rope_table(), whose own contents are numbers of the call.
inline VerbPtr rotate_verb() {
  auto v = std::make_unique<Verb>("rotate");
  const int64_t t = 20, heads = 5;
  RopeTableArgs table{.table = tensor(v->output<float>(kTurns * 64), {kTurns, 2, 32})};
  RotateArgs a{.x = tensor(v->bf16s(t * heads * 128), {t, heads, 128}),
               .positions = tensor(positions_of(*v, t), {t}),
               .rope = {.table = table.table},
               .out = tensor(v->output<bf16>(t * heads * 128), {t, heads, 128})};
  v->run = [=](const Device& d) mutable {
    table.target.device = d;
    rope_table(table);
    a.target.device = d;
    rotate(a);
  };
  return v;
}

inline PrepareQueryArgs prepare_query_args(Verb& v) {
  const int64_t t = 20, heads = 5;
  return {.q = tensor(v.bf16s(t * heads * 512), {t, heads, 512}),
          .norm = {.kind = NormKind::kRms},
          .positions = tensor(positions_of(v, t), {t}),
          .rope = random_rope(v),
          .out = tensor(v.output<bf16>(t * heads * 512), {t, heads, 512})};
}

inline VerbPtr prepare_query_verb() {
  auto v = std::make_unique<Verb>("prepare_query");
  PrepareQueryArgs a = prepare_query_args(*v);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    prepare_query(a);
  };
  return v;
}

inline IndexQueryArgs index_query_args(Verb& v) {
  const int64_t t = 20, heads = 33;
  return {.q = tensor(v.bf16s(t * heads * 128), {t, heads, 128}),
          .weights = tensor(v.floats(t * heads), {t, heads}),
          .positions = tensor(positions_of(v, t), {t}),
          .rope = random_rope(v),
          .hadamard = true,
          .out = tensor(v.output<e4m3>(t * heads * 128), {t, heads, 128}),
          .out_weights = tensor(v.output<float>(t * heads), {t, heads})};
}

inline VerbPtr index_query_verb() {
  auto v = std::make_unique<Verb>("index_query");
  IndexQueryArgs a = index_query_args(*v);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    index_query(a);
  };
  return v;
}

inline VerbPtr prepare_queries_verb() {
  auto v = std::make_unique<Verb>("prepare_queries");
  PrepareQueriesArgs a;
  a.query = prepare_query_args(*v);
  a.index = index_query_args(*v);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    prepare_queries(a);
  };
  return v;
}

// Chunks of two requests that cross the ends of windows, hostile tokens after them. No row of the
// call takes the place of one that an entry reads, so that the call gives the same when it runs
// again.
inline VerbPtr compress_verb(int32_t ratio, bool overlap, bool ring) {
  auto v = std::make_unique<Verb>("compress");
  const int64_t first = ratio + 9, second = 2 * ratio + 3, t = first + second + 2;
  const int64_t values = (overlap ? 2 : 1) * 512;
  const int64_t block = ring ? 8 * ratio : 8, width = ring ? 1 : 8 * ratio / block;
  std::vector<int32_t> positions[2], requests[2];
  std::vector<int64_t> slots[2];
  for (int version = 0; version < 2; ++version) {
    const auto add = [&](int64_t request, int64_t position) {
      positions[version].push_back(static_cast<int32_t>(position));
      requests[version].push_back(static_cast<int32_t>(request));
      slots[version].push_back(static_cast<int64_t>(slots[version].size()) + 3 * version);
    };
    for (int64_t i = 0; i < first; ++i) add(version, i);
    add(version == 0 ? -1 : 7, version == 0 ? 3 : INT32_MAX);
    for (int64_t i = 0; i < second; ++i) add(1 - version, 2 * ratio + i);
    add(0, version == 0 ? INT32_MIN : -1);
  }
  CompressArgs a{.rows = tensor(v->floats(t * 2 * values), {t, 2 * values}),
                 .positions = tensor(v->input(positions[0], positions[1]), {t}),
                 .requests = tensor(v->input(requests[0], requests[1]), {t}),
                 .ratio = ratio,
                 .overlap = overlap};
  a.bias = tensor(v->floats(ratio * values), {ratio, values});
  std::vector<int32_t> table;
  for (int64_t i = 0; i < 2 * width; ++i) table.push_back(static_cast<int32_t>(2 * width - 1 - i));
  if (!ring) table[width - 1] = INT32_MIN;  // a block that is not there
  a.state = {.rows = tensor(v->output<float>(2 * width * block * 2 * values),
                            {2 * width, block, 2 * values}),
             .table = tensor(v->input(table, table), {2, width}),
             .ring = ring};
  a.norm.weight = tensor(v->floats(512), {512});
  a.rope = random_rope(*v);
  a.slots = tensor(v->input(slots[0], slots[1]), {t});
  const int64_t pages = t / 16;  // the last slots are after them
  a.cache = {v->output<uint8_t>(pages * page_bytes(CacheFormat::kV4Fp8, 16)), CacheFormat::kV4Fp8,
             pages, 16};
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    compress(a);
  };
  return v;
}

// write with a prologue: index keys behind LayerNorm, RoPE and Hadamard; records behind the first
// two.
inline WriteArgs write_projections_args(Verb& v, CacheFormat format) {
  const int64_t t = 40, width = record_dim(format), normed = width == 576 ? 512 : width;
  WriteArgs a{.kv = tensor(v.bf16s(t * width), {t, width})};
  std::vector<int64_t> slots[2];  // different ones, some hostile
  for (int version = 0; version < 2; ++version)
    for (int64_t i = 0; i < t; ++i) slots[version].push_back((i * 7 + version) % 67 - 2);
  a.slots = tensor(v.input(slots[0], slots[1]), {t});
  a.cache = {v.output<uint8_t>(page_bytes(format, 60)), format, 1, 60};
  a.prologue = {.norm = {.kind = NormKind::kLayer, .weight = tensor(v.floats(normed), {normed})},
                .rope = random_rope(v),
                .positions = tensor(positions_of(v, t), {t}),
                .hadamard = width == 128};
  return a;
}

inline VerbPtr write_projections_verb() {
  auto v = std::make_unique<Verb>("write_projections");
  WriteArgs a = write_projections_args(*v, CacheFormat::kIndexKeys);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    write(a);
  };
  return v;
}

inline VerbPtr norm_write_verb() {
  auto v = std::make_unique<Verb>("norm_write");
  NormWriteArgs a;
  a.norm = norm_args(*v);
  a.write[0] = write_projections_args(*v, CacheFormat::kV32Fp8);
  a.write[1] = write_projections_args(*v, CacheFormat::kIndexKeys);
  v->run = [=](const Device& d) mutable {
    a.target.device = d;
    norm_write(a);
  };
  return v;
}

}  // namespace winnow::testing
