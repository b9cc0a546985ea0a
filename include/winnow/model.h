// Model families as data, and the questions an engine's backend class asks about caches.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "winnow/tensor.h"

namespace winnow {

struct Model {
  std::string_view name;
  int32_t d_qk;     // query and key size
  int32_t d_v;      // value size; V is the first d_v dims of a record
  int32_t d_nope;   // quantised part of a record
  int32_t d_rope;   // bf16 part of a record, after the quantised one
  CacheFormat fp8;  // the family's record formats
  CacheFormat bf16;
  int32_t lists;  // KV lists per query: 1, or 2 (sliding window + compressed)
  int32_t default_topk;
  int32_t window;  // sliding window, 0 when there is none
};

inline constexpr Model kV32{"v32", 576,  512, 512, 64, CacheFormat::kV32Fp8, CacheFormat::kV32Bf16,
                            1,     2048, 0};
inline constexpr Model kV4{"v4", 512, 512, 448, 64, CacheFormat::kV4Fp8, CacheFormat::kV4Bf16,
                           2,    512, 128};

inline constexpr int32_t kIndexDim = 128;  // head size of the indexer
inline constexpr int32_t kMinHeads = 1, kMaxHeads = 128;

// The model of a name ("v32", "v4"); throws Error naming the known ones.
const Model& model_of(std::string_view name);

// Name and back: "v32_fp8", "v32_bf16", "v4_fp8", "v4_bf16", "index_keys", "index_keys_bf16".
std::string_view name_of(CacheFormat format);
CacheFormat format_of(std::string_view name);

// All formats; the formats that hold a model's latent KV (fp8 first); supported head sizes (d_qk).
std::span<const CacheFormat> cache_formats();
std::array<CacheFormat, 2> cache_formats(const Model& model);
std::span<const int32_t> head_sizes();
bool supports_heads(int64_t heads);  // kMinHeads <= heads <= kMaxHeads

// Bytes that a page of `page` tokens uses, and its size with the format's padding (V4 fp8: rounded
// up to a multiple of 576). Throws if page < 1 or if the product leaves 64 bits.
int64_t page_bytes_used(CacheFormat format, int64_t page);
int64_t page_bytes(CacheFormat format, int64_t page);

// [pages, page bytes]: the shape of the uint8 tensor an engine allocates.
std::array<int64_t, 2> cache_shape(CacheFormat format, int64_t pages, int64_t page);

// Values per token of a format: 576, 512 or 128.
int32_t record_dim(CacheFormat format);

}  // namespace winnow
