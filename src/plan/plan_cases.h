// What the tests of a plan share: batches from lengths, spans as vectors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "winnow/plan.h"

namespace winnow::internal::plan {

using Ints = std::vector<int32_t>;

inline Ints ints(std::span<const int32_t> s) { return Ints(s.begin(), s.end()); }

struct Lengths {
  Ints starts{0}, seq_lens;
  Lengths(const Ints& query, const Ints& seq) : seq_lens(seq) {
    for (int32_t q : query) starts.push_back(starts.back() + q);
  }
  Batch batch(int64_t tokens = 0) const { return {starts, seq_lens, tokens}; }
};

}  // namespace winnow::internal::plan
