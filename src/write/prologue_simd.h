// What stands in front of a record, for a block of rows in Highway vectors: copies, norm, RoPE,
// Hadamard rotation. Included once per target, after hwy/highway.h.
#if defined(WINNOW_WRITE_PROLOGUE_SIMD_H) == defined(HWY_TARGET_TOGGLE)
#ifdef WINNOW_WRITE_PROLOGUE_SIMD_H
#undef WINNOW_WRITE_PROLOGUE_SIMD_H
#else
#define WINNOW_WRITE_PROLOGUE_SIMD_H
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/isa.h"
#include "cpu/prologue_simd.h"
#include "cpu/stream_simd.h"
#include "hwy/highway.h"
#include "write/kernel.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::write::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace hs = cpu::HWY_NAMESPACE;

constexpr int64_t kRows = 8;  // that go through each step together

// Tokens that are stored, what they read, and where they go: found once, and used several times.
struct Block {
  int64_t count = 0;
  int64_t tokens[kRows];
  const bf16* rows[kRows];
  const float* angles[kRows];  // with a table
  std::byte* records[kRows];
  std::byte* scales[kRows];  // of records that have some
};

// More lines than L1 can wait for stop the row at hand, so most CPUs are asked for L2.
inline bool asks_for_l1() { return cpu::isa().zen5; }

// Asks for what the block's row r will read. `rope`: a copy of the caller's own, which no store can
// change.
template <class R>
HWY_INLINE void prefetch_row(const Params& p, const RopeParams& rope, bool to_l1,
                             const Block& block, int64_t r) {
  if (r >= block.count) return;
  constexpr int64_t kValues = hs::kLine / static_cast<int64_t>(sizeof(bf16));
  const bf16* row = block.rows[r];
  const auto ask = [&]<int kLocality>() WINNOW_INLINED {
    for (int64_t i = 0; i < R::kNope; i += kValues) __builtin_prefetch(row + i, 0, kLocality);
    if constexpr (R::kRope > 0) {
      const bf16* part = p.rope_part + block.tokens[r] * p.rope_stride;
      for (int64_t i = 0; i < R::kRope; i += kValues) __builtin_prefetch(part + i, 0, kLocality);
    }
  };
  if (HWY_LIKELY(to_l1)) ask.template operator()<3>();
  else ask.template operator()<2>();
  if (rope.table) hs::prefetch_angles(rope, block.angles[r]);
}

// Whether the factors of a block's norm are found before the codes of the block in front of it. An
// index key's other steps are too short to hide that wait. Long rows took longer with cold caches.
template <class R>
constexpr bool kEarly = R::kDim == kIndexDim;

// How many blocks ahead of a row's prologue that is.
template <class R>
constexpr int kAhead = kEarly<R> ? 2 : 1;

// The block whose rows are asked for while those of another go through their prologue.
struct Ahead {
  const Block& block;
  bool to_l1;
};

// How the values behind a prologue that become codes stand.
template <class R>
constexpr hs::Order kOrder =
    R::kQuantized&& HWY_TARGET != HWY_SCALAR ? hs::Order::kParted : hs::Order::kInTurn;

template <class R>
HWY_INLINE void part_values(bf16* row, int64_t begin, int64_t end) {
  if constexpr (kOrder<R> == hs::Order::kParted)
    for (int64_t i = begin; i < end; i += kRopeDim) hs::part_values<kRopeDim>(row + i, row + i);
}

// Steps of the prologue, each over the block's rows of R::kDim values: one row alone would wait for
// its sums, and then for what the step before stored. Not inlined: side by side in one function
// they take one another's registers and places in the caches of instructions.

// Copies the values that are given.
template <class R>
HWY_NOINLINE void copy_rows(const Params& p, const Block& block, bf16* rows) {
  for (int64_t r = 0; r < block.count; ++r) {
    bf16* row = rows + r * R::kDim;
    std::memcpy(row, block.rows[r], R::kNope * sizeof(bf16));
    if constexpr (R::kRope > 0)
      std::memcpy(row + R::kNope, p.rope_part + block.tokens[r] * p.rope_stride,
                  R::kRope * sizeof(bf16));
  }
}

// Whether what is rotated becomes codes: in index keys, and in front of a record's RoPE part.
template <class R>
bool rotates_codes(const Params& p) {
  return R::kQuantized && (R::kRope == 0 || p.rope.first);
}

// Whether a row stands in one piece: its norm then reads it in place and copies the rest.
template <class R>
bool in_one_piece(const Params& p) {
  return R::kRope == 0 || (p.rope_part == p.kv + R::kNope && p.rope_stride == p.kv_stride);
}

using BlockFactors = hs::RowNorm::Factors[kRows];
static_assert(kRows == hs::RowNorm::kGroup);

// Factors of the norm of rows that are given, or copied (`rows`).
template <class R>
HWY_NOINLINE void find_factors(const hs::RowNorm& norm, const Block& block, const bf16* rows,
                               BlockFactors& factors) {
  const auto source = [&](int64_t r) WINNOW_INLINED -> const bf16* {
    return rows ? rows + r * R::kDim : block.rows[r];
  };
  norm.factors<norm_width(R::kDim)>(block.count, source, factors);
}

#if WINNOW_FLUSHING_ROUNDING
// Norm and RoPE in one pass: what is rotated stays in registers between them. Factors are finite.
// All that the loop would ask in every row is known before it: taken branches cost an index key a
// tenth of its time.
template <class R, bool kFirst, bool kHalf, class Source>
HWY_INLINE void norm_and_rotate(const Params& p, const hs::RowNorm& norm,
                                const BlockFactors& factors, const Block& block, const Ahead& ahead,
                                Source&& source, bf16* rows) {
  using enum hs::Rounding;
  constexpr bool kCoded = R::kQuantized && R::kRope == 0;
  constexpr hs::Order kRotated = kCoded ? kOrder<R> : hs::Order::kInTurn;
  constexpr int64_t kWidth = norm_width(R::kDim);
  constexpr int64_t kSlice = kFirst ? 0 : R::kDim - kRopeDim;  // what is rotated
  constexpr int64_t kBegin = kFirst ? kRopeDim : 0,
                    kEnd = kFirst ? kWidth : std::min(kWidth, kSlice);
  constexpr int64_t kCodes = R::kQuantized ? std::min<int64_t>(R::kNope, kEnd) : kBegin;
  const hs::FloatRounding rounded;
  const RopeParams rope = p.rope;
  core::Angles copy;
  norm.with_kind([&]<bool kCentred, bool kBiased>() WINNOW_INLINED {
    for (int64_t r = 0; r < block.count; ++r) {
      prefetch_row<R>(p, rope, ahead.to_l1, ahead.block, r);
      const bf16* x = source(r);
      bf16* row = rows + r * R::kDim;
      norm.finish_parts<kCentred, kBiased, kFlushing, kOrder<R>>(factors[r], x, kBegin, kCodes,
                                                                 row);
      norm.finish_parts<kCentred, kBiased, kChecked, hs::Order::kInTurn>(factors[r], x, kCodes,
                                                                         kEnd, row);
      const hs::AnglesAt angles = hs::angles_at(rope, block.angles[r], copy);
      const auto two = [&](int64_t i) WINNOW_INLINED {
        if constexpr (kSlice >= kWidth) {
          return hs::load_two(hn::Full512<float>(), x + kSlice + i);
        } else {
          const auto v = norm.normed_two<kCentred, kBiased>(factors[r], x, kSlice + i);
          return decltype(v){rounded(v.first), rounded(v.second)};
        }
      };
      hs::rotate_parts<kRotated, kCoded ? kFlushing : kChecked>(kHalf, angles, two, row + kSlice);
    }
  });
}
#endif

// The norm of rows that are given (`whole`: in one piece) or copied, by their factors. Gives
// whether they are rotated as well.
template <class R>
HWY_NOINLINE bool norm_rows(const Params& p, const hs::RowNorm& norm, bool whole, hs::Coded coded,
                            const BlockFactors& factors, const Block& block, const Ahead& ahead,
                            bf16* rows) {
  const auto source = [&](int64_t r) WINNOW_INLINED -> const bf16* {
    return R::kRope == 0 || whole ? block.rows[r] : rows + r * R::kDim;
  };
#if WINNOW_FLUSHING_ROUNDING
  const bool usual = R::kRope == 0 || !p.rope.first;
  if (p.rope.table && usual && coded.flush == R::kQuantized &&
      norm.in_parts(factors, block.count)) {
    const auto run = [&]<bool kFirst>() WINNOW_INLINED {
      if (p.rope.half)
        norm_and_rotate<R, kFirst, true>(p, norm, factors, block, ahead, source, rows);
      else norm_and_rotate<R, kFirst, false>(p, norm, factors, block, ahead, source, rows);
    };
    if (R::kRope == 0 && p.rope.first) run.template operator()<R::kRope == 0>();
    else run.template operator()<false>();
    return true;
  }
#endif
  for (int64_t r = 0; r < block.count; ++r) {
    prefetch_row<R>(p, p.rope, ahead.to_l1, ahead.block, r);
    bf16* row = rows + r * R::kDim;
    norm.finish<kOrder<R>>(factors[r], source(r), row, coded);
    if (whole && p.norm_width < R::kDim) hs::copy_64(source(r) + p.norm_width, row + p.norm_width);
  }
  return false;
}

template <class R>
HWY_NOINLINE void rotate_rows(const Params& p, bool flush, const Block& block, bf16* rows) {
  const bool coded = rotates_codes<R>(p);
  const hs::Rounding rounding = hs::rounding_of(flush && coded);
  for (int64_t r = 0; r < block.count; ++r) {
    bf16* slice = rows + r * R::kDim + rope_begin(p.rope, R::kDim);
    hs::rotate_at(p.rope, block.angles[r], rounding, slice, slice);
    if (coded && !p.hadamard) part_values<R>(slice, 0, kRopeDim);
  }
}

template <class R>
HWY_NOINLINE void hadamard_rows(const Block& block, bf16* rows) {
  for (int64_t r = 0; r < block.count; ++r) {
    hs::hadamard_row(rows + r * R::kDim, rows + r * R::kDim);
    part_values<R>(rows + r * R::kDim, 0, R::kDim);
  }
}

// Begins the prologue of a block: finds the factors of rows in one piece.
template <class R>
HWY_INLINE void begin_rows(const Params& p, const hs::RowNorm& norm, const Block& block,
                           BlockFactors& factors) {
  if (p.norm.kind != NormKind::kNone && in_one_piece<R>(p))
    find_factors<R>(norm, block, nullptr, factors);
}

// The rest of it: rows behind their prologue, which begin_rows() has begun, while those ahead
// are on their way. `flush`: subnormal values that become codes may become zeros.
template <class R>
HWY_INLINE void finish_rows(const Params& p, const hs::RowNorm& norm, bool flush,
                            const Block& block, const Ahead& ahead, BlockFactors& factors,
                            bf16* rows) {
  const hs::Coded coded = p.hadamard ? hs::Coded() : hs::coded_of<R>(p.rope, flush);
  const bool whole = in_one_piece<R>(p);
  const bool normed = p.norm.kind != NormKind::kNone;
  if (!whole || !normed) copy_rows<R>(p, block, rows);
  bool rotated = p.rope.table == nullptr;
  if (normed) {
    if (!whole) find_factors<R>(norm, block, rows, factors);
    rotated |= norm_rows<R>(p, norm, whole, coded, factors, block, ahead, rows);
  } else {
    for (int64_t r = 0; r < block.count; ++r) {
      prefetch_row<R>(p, p.rope, ahead.to_l1, ahead.block, r);
      part_values<R>(rows + r * R::kDim, coded.begin, coded.end);
    }
  }
  if (!rotated) rotate_rows<R>(p, flush, block, rows);
  if constexpr (R::kDim == kIndexDim)
    if (p.hadamard) hadamard_rows<R>(block, rows);
}

}  // namespace winnow::internal::write::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
