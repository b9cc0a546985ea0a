// Streams of requests for the tests of compress: rows of every position, a state and caches, and
// one call for any mix of tokens.
#pragma once

#include <algorithm>
#include <cmath>

#include "compress/compress_cases.h"
#include "core/formats.h"
#include "testing.h"
#include "winnow/model.h"

namespace winnow::internal::compress {

using testing::Guarded;

enum class StateKind { kPaged, kRing };

// A token of a call; hostile ones have positions and requests of their own.
struct Token {
  int32_t request, position;
};

struct Problem {
  Case c;
  int64_t columns, most;
  Guarded<float> bias, weight, angles;
  std::vector<std::vector<float>> rows;  // of each request: [length, columns]

  explicit Problem(const Case& c_, uint64_t seed = 1)
      : c(c_),
        columns((c.gate ? 2 : 1) * c.values()),
        most(*std::max_element(c.lengths.begin(), c.lengths.end())),
        bias(c.ratio * c.values()),
        weight(c.width()),
        angles(most * 64) {
    testing::Rng rng(seed);
    for (float& b : bias) b = testing::normal(rng);
    for (float& w : weight) w = 1 + 0.2f * testing::normal(rng);
    rope_table({.theta = 160000, .factor = 16, .original = 65536, .table = table()});
    for (const int32_t length : c.lengths) rows.push_back(draw_rows(rng, length));
  }

  std::vector<float> draw_rows(testing::Rng& rng, int64_t count) const {
    std::vector<float> drawn(count * columns);
    for (float& v : drawn) {
      v = 2 * testing::normal(rng);
      if (c.bf16_rows) v = to_float(to_bf16(v));
    }
    return drawn;
  }
  Tensor table() {
    return c.paired_table ? tensor(angles.data(), {most, 2, 32}, {64, 1, 2})
                          : tensor(angles.data(), {most, 2, 32});
  }
  std::vector<Token> whole() const {
    std::vector<Token> tokens;
    for (size_t r = 0; r < rows.size(); ++r)
      for (int32_t p = 0; p < c.lengths[r]; ++p) tokens.push_back({static_cast<int32_t>(r), p});
    return tokens;
  }
};

// What a run leaves behind: state and cache. Requests have their entries at slots of their own.
struct Memory {
  const Case& c;
  StateKind kind;
  int64_t blocks, block, pages, table_width;
  Guarded<float> state;
  Guarded<int32_t> table;
  bool has_table = true;  // else a ring's request is its block
  Guarded<std::byte> cache;

  // The ring holds what `drafts` drafts a step need.
  Memory(const Problem& p, StateKind kind_, int32_t drafts = 0)
      : c(p.c),
        kind(kind_),
        blocks(kind == StateKind::kRing ? p.rows.size() + 1
                                        : p.rows.size() * (p.most / c.block + 1) + 2),
        block(kind == StateKind::kRing ? std::max(1, c.window() - 1 + drafts) : c.block),
        pages((p.most / c.ratio + c.page) / c.page * p.rows.size()),
        table_width(kind == StateKind::kRing ? 1 : p.most / c.block + 1),
        state(blocks * block * 2 * c.values(), 0xff),  // NaN: a row that was not written shows
        table(p.rows.size() * table_width),
        cache(pages * page_bytes(c.format, c.page)) {
    // Blocks in descending order: row and block of a request differ.
    for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
  }
  int64_t slot(const Problem& p, const Token& t) const {
    return t.request * ((p.most / c.ratio + c.page) / c.page * c.page) + t.position / c.ratio;
  }
};

// One call's tensors.
struct Step {
  Guarded<float> rows;
  Guarded<bf16> bf16_rows;
  Guarded<int32_t> positions, requests;
  Guarded<int64_t> slots;
  CompressArgs args;

  // Rows are those of the problem, or `other` [tokens, columns].
  Step(Problem& p, Memory& m, const std::vector<Token>& tokens,
       const std::vector<float>* other = nullptr)
      : rows(tokens.size() * p.columns),
        bf16_rows(tokens.size() * p.columns),
        positions(tokens.size()),
        requests(tokens.size()),
        slots(tokens.size()) {
    const auto count = static_cast<int64_t>(tokens.size());
    for (int64_t t = 0; t < count; ++t) {
      const auto& [request, position] = tokens[t];
      positions[t] = position;
      requests[t] = request;
      const bool known = request >= 0 && request < static_cast<int32_t>(p.rows.size()) &&
                         position >= 0 && position < p.c.lengths[request];
      slots[t] = known && (position + 1) % p.c.ratio == 0 ? m.slot(p, tokens[t]) : -1;
      const float* from = other   ? other->data() + t * p.columns
                          : known ? p.rows[request].data() + position * p.columns
                                  : p.rows[0].data();
      std::copy_n(from, p.columns, rows.data() + t * p.columns);
    }
    for (size_t i = 0; i < rows.size(); ++i) bf16_rows[i] = to_bf16(rows[i]);
    args.rows = p.c.bf16_rows ? tensor(bf16_rows.data(), {count, p.columns})
                              : tensor(rows.data(), {count, p.columns});
    args.positions = tensor(positions.data(), {count});
    args.requests = tensor(requests.data(), {count});
    args.ratio = p.c.ratio;
    args.overlap = p.c.overlap;
    args.gate = p.c.gate;
    if (p.c.bias) args.bias = tensor(p.bias.data(), {p.c.ratio, p.c.values()});
    if (p.c.gate) {
      args.state.rows = tensor(m.state.data(), {m.blocks, m.block, 2 * p.c.values()});
      args.state.ring = m.kind == StateKind::kRing;
      if (m.has_table)
        args.state.table =
            tensor(m.table.data(), {static_cast<int64_t>(p.rows.size()), m.table_width});
    }
    args.norm = {.weight = tensor(p.weight.data(), {p.c.width()}), .eps = p.c.eps};
    args.rope = {.table = p.table()};
    args.hadamard = p.c.hadamard;
    args.slots = tensor(slots.data(), {count});
    args.cache = {m.cache.data(), p.c.format, m.pages, p.c.page};
  }
};

inline void run(Problem& p, Memory& m, const std::vector<Token>& tokens, const std::string& kernel,
                const std::vector<float>* other = nullptr) {
  Step step(p, m, tokens, other);
  step.args.target = testing::target("compress", kernel);
  winnow::compress(step.args);
  ASSERT_TRUE(testing::device_finished());
}

}  // namespace winnow::internal::compress
