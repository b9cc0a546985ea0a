// The shapes and contents that attend is tested with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "winnow/precision.h"
#include "winnow/tensor.h"

namespace winnow::internal::attend {

// What the logits of a case look like.
enum class Logits : uint8_t {
  kPlain,     // a few units apart
  kDominant,  // one key far above the others
  kEqual,     // all keys the same record
  kWide,      // spread over hundreds: most weights underflow
  kHuge,      // around 1e30
};

// How the fp32 scales of V3.2's fp8 records are made.
enum class Scales : uint8_t {
  kAny,
  kPowers,      // of two
  kMostPowers,  // all but those of one record in 200
};

struct CaseList {
  CacheFormat format = CacheFormat::kV32Fp8;
  int32_t page = 64;
  int64_t pages = 4;
  int64_t width = 0;     // columns
  bool lengths = false;  // some shorter than the row, one 0, some negative or too large
  bool logical = false;  // ids through a block table
  Scales scales = Scales::kAny;
  bool padded = false;  // -1 where lengths would end a row
};

struct Case {
  std::string name;
  int64_t tokens = 2, heads = 16;
  CaseList list[2] = {};
  int lists = 1;
  bool sink = false;
  bool split_query = false;  // q_rope apart
  bool strided = false;      // gaps between tokens, heads and pages; out likewise
  Logits logits = Logits::kPlain;
  float scale = 0.0416f;
};

// The precision that a kernel is for.
inline Precision precision_of(const std::string& kernel) {
  return kernel == "sm90/fp8" ? Precision::kFp8 : Precision::kFull;
}

// The support that tests expect: why a kernel of the table leaves a case to the others, or null if
// it serves it. All but the wide one and that for e4m3 products serve every case.
inline const char* left_out(const std::string& kernel, const Case& c) {
  if (precision_of(kernel) == Precision::kFp8) {
    for (int i = 0; i < c.lists; ++i)
      if (c.list[i].format != CacheFormat::kV32Fp8) return "V3.2's fp8 records alone";
    return nullptr;
  }
  if (!kernel.starts_with("sm90/wide")) return nullptr;
  for (int i = 0; i < c.lists; ++i) {
    const CacheFormat format = c.list[i].format;
    if (format != CacheFormat::kV32Bf16 && format != CacheFormat::kV4Bf16) return "not bf16";
    if (format != c.list[0].format) return "different cache formats";
  }
  return nullptr;
}

// Why a kernel may leave out any case, as the number of multiprocessors has it, or null.
inline const char* may_leave_out(const std::string& kernel) {
  return kernel == "sm90/wide+decode" ? "no tokens behind the last full wave" : nullptr;
}

#ifdef WINNOW_WITH_CUDA
inline constexpr bool kDevice = true;
#else
inline constexpr bool kDevice = false;
#endif

inline std::vector<Case> cases() {
  using enum CacheFormat;
  std::vector<Case> all;
  // Formats x heads.
  const std::pair<CacheFormat, const char*> formats[] = {
      {kV32Fp8, "v32_fp8"}, {kV32Bf16, "v32_bf16"}, {kV4Fp8, "v4_fp8"}, {kV4Bf16, "v4_bf16"}};
  for (const auto& [format, name] : formats)
    for (const int64_t heads : {1, 3, 8, 12, 16, 24, 64, 128})
      all.push_back({.name = std::string(name) + "_h" + std::to_string(heads),
                     .heads = heads,
                     .list = {{format, 64, 3, heads >= 64 ? 75 : 133}}});
  // Odd numbers of blocks of heads and several of keys, the last of each in part.
  all.push_back({.name = "v32_fp8_h33_w311", .heads = 33, .list = {{kV32Fp8, 64, 6, 311}}});
  all.push_back({.name = "v4_bf16_h100_w523", .heads = 100, .list = {{kV4Bf16, 64, 9, 523}}});
  // Scales that kernels may add to exponents, in all blocks of a token and in some.
  for (const int64_t heads : {9, 24, 128})
    all.push_back({.name = "v32_powers_h" + std::to_string(heads),
                   .heads = heads,
                   .list = {{kV32Fp8, 64, 6, 311, false, false, Scales::kPowers}}});
  all.push_back({.name = "v32_most_powers",
                 .heads = 33,
                 .list = {{kV32Fp8, 64, 8, 1200, false, false, Scales::kMostPowers}}});
  // Widths, page sizes, lengths, indirection.
  for (const int64_t width : {0, 1, 2, 7, 63, 64, 65, 129, 1000})
    all.push_back({.name = "width_" + std::to_string(width),
                   .tokens = 3,
                   .heads = 5,
                   .list = {{kV32Fp8, 64, 5, width, width % 2 == 1}}});
  for (const int32_t page : {1, 2, 3, 64, 256})
    for (const auto& [format, name] : {formats[0], formats[2], formats[3]})
      all.push_back({.name = std::string(name) + "_page_" + std::to_string(page),
                     .tokens = 3,
                     .heads = 4,
                     .list = {{format, page, 5 + 200 / page, 90, page != 64, page > 1}}});
  // Two lists: same and mixed formats, one of them empty.
  all.push_back({"v4_window_extra", 3, 16, {{kV4Fp8, 64, 3, 128}, {kV4Fp8, 2, 70, 65}}, 2, true});
  all.push_back({"v4_lengths_logical",
                 4,
                 12,
                 {{kV4Fp8, 64, 3, 70, true, true}, {kV4Fp8, 2, 70, 65, true, true}},
                 2,
                 true});
  all.push_back({"v4_mixed", 3, 8, {{kV4Fp8, 64, 3, 33, true}, {kV4Bf16, 3, 40, 100}}, 2});
  all.push_back(
      {"v32_mixed", 3, 24, {{kV32Bf16, 200, 1, 31}, {kV32Fp8, 64, 3, 97, true}}, 2, true});
  all.push_back({"first_list_empty", 2, 6, {{kV4Fp8, 64, 2, 0}, {kV4Fp8, 64, 2, 40}}, 2, true});
  all.push_back({"second_list_empty", 2, 6, {{kV4Fp8, 64, 2, 40}, {kV4Fp8, 64, 2, 0}}, 2});
  all.push_back(
      {"v4_two_lists_h128", 1, 128, {{kV4Fp8, 64, 3, 100}, {kV4Fp8, 64, 3, 60}}, 2, true});
  // Queries in halves, gaps everywhere.
  all.push_back({"halves", 3, 7, {{kV32Fp8, 64, 3, 50}}, 1, true, true});
  all.push_back({"halves_strided", 3, 9, {{kV4Fp8, 64, 3, 50, true}}, 1, true, true, true});
  all.push_back({"strided", 3, 20, {{kV32Bf16, 7, 30, 50}}, 1, false, false, true});
  // No tokens; many tokens; a long list that every worker shares.
  all.push_back({"no_tokens", 0, 4, {{kV32Fp8, 64, 1, 10}}});
  all.push_back({"many_tokens", 37, 2, {{kV4Fp8, 64, 3, 20, true, true}}, 1, true});
  // More tokens than a device has multiprocessors, twice over; a CPU goes several times round
  // with 40.
  const int64_t twice = kDevice ? 270 : 40, once = kDevice ? 140 : 20;
  all.push_back({"v32_rounds", twice, 9, {{kV32Fp8, 64, 3, 66, true}}, 1, true});
  all.push_back({"v4_rounds",
                 twice,
                 9,
                 {{kV4Fp8, 64, 3, 33, true, true}, {kV4Fp8, 2, 70, 35, true}},
                 2,
                 true});
  all.push_back(
      {"v4_rounds_h50", once, 50, {{kV4Fp8, 64, 3, 11, true}, {kV4Fp8, 2, 70, 9}}, 2, true});
  all.push_back({"v4_logical_h50", once, 50, {{kV4Fp8, 64, 3, 75, true, true}}, 1, true});
  // Several blocks, and tokens without any between others; with 30 heads one list by logical ids.
  for (const int64_t heads : {30, 100})
    all.push_back({.name = "v4_rounds_h" + std::to_string(heads),
                   .tokens = twice,
                   .heads = heads,
                   .list = {{kV4Fp8, 64, 3, 130, true}, {kV4Fp8, 2, 70, 15, true, heads == 30}},
                   .lists = 2,
                   .sink = true,
                   .strided = true});
  // Rows of short contexts without lengths: -1 at their ends, for more than a warp sees at once.
  const auto padded = [&](const char* what, int64_t tokens, int64_t heads, CacheFormat format) {
    CaseList list{format, 64, 5, 270};
    list.padded = true;
    all.push_back({std::string("padded_") + what, tokens, heads, {list}, 1, true});
  };
  padded("v32", 5, 65, kV32Fp8), padded("v4_rounds", once, 9, kV4Fp8);
  padded("v32_alone", once, 33, kV32Fp8), padded("v32_wide", once, 33, kV32Bf16);
  CaseList window{kV4Fp8, 64, 3, 130}, extra{kV4Fp8, 2, 70, 65};
  window.padded = extra.padded = true;
  all.push_back({"padded_two_lists", 7, 20, {window, extra}, 2, true});
  window.format = extra.format = kV4Bf16;
  all.push_back({"padded_two_wide", once, 40, {window, extra}, 2, true});
  all.push_back({"one_long_token", 1, 16, {{kV32Fp8, 64, 8, 2048}}, 1, true});
  all.push_back({"no_pages", 2, 4, {{kV32Fp8, 64, 0, 10}}, 1, true});
  // Logits.
  for (const auto& [format, name] : {formats[0], formats[3]}) {
    const auto add = [&](const char* what, Logits logits, float scale, int64_t tokens = 2) {
      all.push_back({.name = std::string(name) + "_" + what,
                     .tokens = tokens,
                     .heads = 10,
                     .list = {{format, 64, 3, 150}},
                     .sink = true,
                     .logits = logits,
                     .scale = scale});
    };
    add("dominant", Logits::kDominant, 0.04f);
    add("equal", Logits::kEqual, 0.04f);
    add("wide", Logits::kWide, 0.04f);
    add("huge", Logits::kHuge, 0.04f);
    add("huge_uncut", Logits::kHuge, 0.04f, once);  // three blocks a token, none cut on a device
    add("scale_zero", Logits::kPlain, 0.0f);
    add("scale_negative", Logits::kPlain, -0.05f);
    add("scale_tiny", Logits::kPlain, 1e-30f);
  }
  return all;
}

}  // namespace winnow::internal::attend
