// compress on the device: its kernels by the rows that an entry takes.
#pragma once

#include "compress/quads_sm90.cuh"

namespace winnow::internal::compress {

inline constexpr int kFewRows = 8;

// Entries of up to kFewRows rows. `many`: tokens of a prefill, whose rows take no place that an
// entry reads, or are not stored here.
void few_rows(const Call& call, Load load, bool many) noexcept;

// Those of a prefill whose windows are streamed; false: not such a call, and nothing is done.
bool stream_rows(const Call& call, Load load) noexcept;

// Those of C4A's indexer, of a usual call; false: not such a call, and nothing is done.
bool overlap_rows(const Call& call, Load load) noexcept;

// Entries of any number of rows.
void many_rows(const Call& call, Load load) noexcept;

// Those of 128 rows of a usual call; false: not such a call, and nothing is done.
bool long_rows(const Call& call, Load load) noexcept;

}  // namespace winnow::internal::compress
