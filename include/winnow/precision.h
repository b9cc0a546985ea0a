// How far attend() may round what it multiplies.
#pragma once

#include <cstdint>

namespace winnow {

enum class Precision : uint8_t {
  // Products of 16-bit values; attend.h says how they are rounded.
  kFull,
  // Products of e4m3: queries and weights are rounded to one e4m3 value each, and the codes of fp8
  // records are multiplied as they are stored. Only the caller chooses it. Hopper serves V3.2's
  // records and lists of up to 4,096 columns; on the CPU only the reference does, if named.
  //
  // Of a token, over the valid entries j, with codes c_ji and scales S_jt of their tiles t:
  //   q'_i  = e4m3(2^a q_i) / 2^a for columns that are codes in the records; RoPE's keep q_i.
  //           a: 2^a times the largest |q| of the token is in [2^7, 2^8)
  //   s_j   = scale * q' . K_j,   w_j = e^{s_j},   lse = ln sum w_j
  //   w'_jt = e4m3(2^b w_j S_jt) / 2^b. b: 2^b times the largest w_j max_t S_jt so far is in
  //           [2^3, 2^8)
  //   out_i = sum_j w'_jt c_ji / sum_j w_j
  // e4m3 rounds to the nearest, by at most 2^-4 of a value and by 2.7 % in the mean (root of the
  // mean square); a value below 2^-6, by at most 2^-10.
  //
  // Errors. A logit is off by up to L = 2^-4 scale sum_i |q_i K_ji|, in the mean by 2.7 % of scale
  // * sqrt(sum_i (q_i K_ji)^2), which is near the deviation of the logits; lse by no more. With p_j
  // = e^{s_j - lse} and n keys
  //   |out - exact| <= (e^{2 L} (1 + 2^-4 + 2^-18 n) - 1) sum_j p_j |v_j|
  //                    + 2^-13 n e^{2 L} max_j (p_j 448 max_t S_jt),
  // where 2^-18 n is what products of e4m3 lose when they are added up. In the mean that is 2.7 %
  // of the output, and up to 2.7 % * sqrt(1 + d^2) where logits have a deviation d: docs/fp8.md has
  // measurements.
  //
  // A scale of 2^67 or more gives NaN, one below 2^-60 may count as 2^-60, an infinity in q gives
  // its head NaN.
  kFp8,
};

}  // namespace winnow
