// Decode on Hopper: tokens that are helped (Way::kHelped, helped.cuh), and which CTA has which part
// of them. Arithmetic alone, for the launch, for the kernel, and for decode_cuts_test.cpp on any
// machine.
//
// A token has one or two CTAs of its own, its mains, each with main_blocks of the token's first
// blocks. The rests of all tokens, what their mains leave, are laid one after the other and dealt
// out evenly to other CTAs, the helpers:
//
//   token 0           token 1           token 2        (one main each, two helpers)
//   [main 0   |rest]  [main 1   |rest]  [main 2   |rest]
//   rests laid together:  rest 0 rest 1 rest 2
//   helper 3:             rest 0, first half of rest 1
//   helper 4:             second half of rest 1, rest 2
//
// The CTAs of a group of heads are numbered: mains come first, those of a token side by side, then
// the helpers. A CTA's number is passed as a function object `cta`, which is called where the
// number is needed: weigh has no register to keep it. `Call` is HelpedTokens with `tokens` and
// `groups` of heads, as in the kernel's arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/arithmetic.h"
#include "core/hd.h"

namespace winnow::internal::attend::decode_sm90 {

// The most parts of a token: two mains' and two helpers'. The most parts of a helper, which knows
// them by their tokens modulo this.
constexpr int kMostTokenParts = 4;
constexpr int kMostHelperParts = 4;
// The most blocks of a list that is cut so. Up to them all quotients by reciprocals are exact.
constexpr int kMostHelpedBlocks = 256;
// The workspace of helped tokens: a flag for each part, statistics of its heads, then sums.
constexpr int kMostParts = 256;
constexpr size_t kPartFlagBytes = kMostParts * sizeof(uint32_t);
constexpr size_t helped_bytes(int heads, int stored_halves) {
  return kPartFlagBytes + static_cast<size_t>(heads) * (kMostParts * 4 * sizeof(float) +
                                                        static_cast<size_t>(stored_halves) * 512);
}

// How tokens are cut into parts. Blocks are those of a full list.
struct HelpedTokens {
  // Blocks of a token, and 2^30 over them, rounded up: over_token_blocks(). 0: tokens are not
  // helped.
  int token_blocks;
  uint32_t token_reciprocal;
  // A token's own CTAs, 1 or 2, those of all tokens, and the blocks of each.
  int mains;
  int main_ctas;
  int main_blocks;
  // Blocks of a token that are left to helpers, and 2^30 over them, rounded up.
  int rest_blocks;
  uint32_t rest_reciprocal;
  // CTAs that help, for each group of heads, and 2^30 over them, rounded up.
  int helpers;
  uint32_t helper_reciprocal;
  // 2^30 over the tokens, rounded up.
  uint32_t tokens_reciprocal;
  // A list of fewer blocks than this is left to the mains: helpers would take longer.
  int least_helped;
  // The first part whose sums are stored (place_of_part()).
  int first_stored;
};

// n / token_blocks, exact below 2^20.
WINNOW_HD_INLINE int over_token_blocks(const HelpedTokens& of, int n) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * of.token_reciprocal >> 30);
}
// n / rest_blocks, n / helpers and n / tokens, exact below 2^22, 2^22 and 2^20.
WINNOW_HD_INLINE int over_rest_blocks(const HelpedTokens& of, int n) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * of.rest_reciprocal >> 30);
}
WINNOW_HD_INLINE int over_helpers(const HelpedTokens& of, int n) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * of.helper_reciprocal >> 30);
}
WINNOW_HD_INLINE int over_tokens(const HelpedTokens& of, int n) {
  return static_cast<int>(uint64_t{static_cast<uint32_t>(n)} * of.tokens_reciprocal >> 30);
}

// Not std::min(), whose references cost registers.
WINNOW_HD_INLINE int smaller(int a, int b) { return a < b ? a : b; }
WINNOW_HD_INLINE int larger(int a, int b) { return a > b ? a : b; }

// A part of a token: its blocks [first, last) if its list is full.
struct Part {
  int token, first, last;
};

// The first block of a helper's share, counted over the rests of all tokens.
template <class Call>
WINNOW_HD_INLINE int rest_begin(const Call& of, int helper) {
  return over_helpers(of, helper * (of.tokens * of.rest_blocks));
}
// The part that a CTA begins with.
template <class Call, class Cta>
WINNOW_HD_INLINE Part first_part(const Call& of, Cta cta) {
  const int here = cta();
  const int own_blocks = of.token_blocks - of.rest_blocks;
  if (here < of.main_ctas) {
    const int rank = here & (of.mains - 1);
    return {here >> (of.mains - 1), rank * of.main_blocks, (rank + 1) * of.main_blocks};
  }
  const int begin = rest_begin(of, here - of.main_ctas);
  const int end = rest_begin(of, here - of.main_ctas + 1);
  const int token = over_rest_blocks(of, begin);
  const int first = own_blocks + begin - token * of.rest_blocks;
  return {token, first, smaller(first + (end - begin), of.token_blocks)};
}
// A helper's part of a later token, empty where it has none.
template <class Call, class Cta>
WINNOW_HD_INLINE Part later_part(const Call& of, Cta cta, int token) {
  const int own_blocks = of.token_blocks - of.rest_blocks;
  const int left = rest_begin(of, cta() - of.main_ctas + 1) - token * of.rest_blocks;
  return {token, own_blocks, own_blocks + smaller(larger(left, 0), of.rest_blocks)};
}

// Rows of a block.
constexpr int kBlockRows = 64;

// Whether a list of so many positions is left to its mains.
WINNOW_HD_INLINE bool left_to_mains(const HelpedTokens& of, int positions) {
  return ceil_div(positions, kBlockRows) < of.least_helped;
}
// The first position of a part of a list, and the one after its last.
struct alignas(8) Positions {
  int begin, end;
};
// The positions that a part has of a list of so many. Of a list that is not full a part has the
// same share as of a full one, or the mains have all of it; then a helper has {0, 0}.
template <class Cta>
WINNOW_HD_INLINE Positions positions_of(const HelpedTokens& of, const Part& part, Cta cta,
                                        int positions) {
  const int blocks = ceil_div(positions, kBlockRows);
  int begin = part.first;
  int end = part.last;
  if (left_to_mains(of, positions)) {
    const int rank = cta() & (of.mains - 1);
    const bool helps = cta() >= of.main_ctas;
    begin = helps ? 0 : rank * blocks >> (of.mains - 1);
    end = helps ? 0 : (rank + 1) * blocks >> (of.mains - 1);
  } else if (blocks < of.token_blocks) {
    begin = over_token_blocks(of, begin * blocks);
    end = over_token_blocks(of, end * blocks);
  }
  return {smaller(begin * kBlockRows, positions), smaller(end * kBlockRows, positions)};
}

// The number of a part: a main's is that of its CTA, after the mains come the helpers' parts, token
// by token. (A step to the next part is one to the next token, to the next helper, or both.)
WINNOW_HD_INLINE int helper_part(const HelpedTokens& of, int helper, int token) {
  return of.main_ctas + helper + token;
}
// The number of the part of `token` that a CTA has.
template <class Cta>
WINNOW_HD_INLINE int part_of(const HelpedTokens& of, Cta cta, int token) {
  const int here = cta();
  return here < of.main_ctas ? here : helper_part(of, here - of.main_ctas, token);
}

// Where a part of a group of heads is in the workspace. A token's only main stores nothing.
template <class Call>
WINNOW_HD_INLINE int place_of_part(const Call& of, int part, int group) {
  return (part - of.first_stored) * of.groups + group;
}
// And where its sums of 256 columns are. A main stores those of one half alone, a helper both.
template <class Call>
WINNOW_HD_INLINE int place_of_half(const Call& of, int part, int group, int half) {
  const int place = place_of_part(of, part, group);
  const int stored_mains = (of.main_ctas - of.first_stored) * of.groups;
  return part < of.main_ctas ? place : 2 * place - stored_mains + half;
}

// The parts of a main's token that other CTAs have: those of helpers, then that of the other main.
struct OtherParts {
  int first_helper, helpers, count;
  WINNOW_HD_INLINE OtherParts(const HelpedTokens& of, int token) {
    // The helpers of the rest's first and last block.
    const int first =
        over_tokens(of, over_rest_blocks(of, (token * of.rest_blocks + 1) * of.helpers - 1));
    const int last = over_tokens(of, (token + 1) * of.helpers - 1);
    first_helper = helper_part(of, first, token);
    helpers = last - first + 1;
    count = helpers + of.mains - 1;
  }
  WINNOW_HD_INLINE void leave_out_helpers() {
    count -= helpers;
    helpers = 0;
  }
  template <class Cta>
  WINNOW_HD_INLINE int part(int i, Cta cta) const {
    return i < helpers ? first_helper + i : cta() ^ 1;
  }
};

}  // namespace winnow::internal::attend::decode_sm90
