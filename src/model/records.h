// From a run-time CacheFormat to the record's traits.
#pragma once

#include "core/namespaces.h"
#include "model/index.h"
#include "model/v32.h"
#include "model/v4.h"

namespace winnow::internal::model {

// Calls f(Record{}) with the traits of the format and returns what it returns.
template <class F>
constexpr decltype(auto) with_record(CacheFormat format, F&& f) {
  switch (format) {
    case CacheFormat::kV32Fp8: return f(V32Fp8{});
    case CacheFormat::kV32Bf16: return f(V32Bf16{});
    case CacheFormat::kV4Fp8: return f(V4Fp8{});
    case CacheFormat::kV4Bf16: return f(V4Bf16{});
    case CacheFormat::kIndexKeys: return f(IndexKeys{});
    case CacheFormat::kIndexKeysBf16: break;
  }
  return f(IndexKeysBf16{});
}

// The same for formats that hold latent KV.
template <class F>
constexpr decltype(auto) with_latent(CacheFormat format, F&& f) {
  switch (format) {
    case CacheFormat::kV32Fp8: return f(V32Fp8{});
    case CacheFormat::kV32Bf16: return f(V32Bf16{});
    case CacheFormat::kV4Fp8: return f(V4Fp8{});
    default: return f(V4Bf16{});
  }
}

// The same for formats that compressed entries have: V4's and the indexer's.
template <class F>
constexpr decltype(auto) with_entry(CacheFormat format, F&& f) {
  switch (format) {
    case CacheFormat::kV4Fp8: return f(V4Fp8{});
    case CacheFormat::kV4Bf16: return f(V4Bf16{});
    case CacheFormat::kIndexKeys: return f(IndexKeys{});
    default: return f(IndexKeysBf16{});
  }
}

}  // namespace winnow::internal::model
