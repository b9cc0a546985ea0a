// absorb with bf16 dot products (VDPBF16PS), for CPUs where they run at twice the FMA rate.
//
// Weights are packed as pairs of k, 16 columns a vector, up to 128 k by 128 columns (32 KB, L1),
// and all rows are multiplied with a packed piece, 12 at a time. An element is one fp32 chain over
// k, ascending, so a row's result does not depend on the other rows, the threads or the piece.
//
// Budget per 32 KB of weights: 512 lines written, 64 shuffles per 16 columns and 32 k where k is
// contiguous, 2 per 32 columns and 2 k where columns are; 512 products a row, with 14 loads per 24.
// Few rows are bound by the weights' bytes. In weights of [L, H, P], 256 bytes are contiguous in
// every H * 256: no hardware prefetcher follows that, and the lines fall on few sets of the caches.
// So a worker goes through small pieces of neighbouring heads and fetches the next while it packs
// one. Many rows are bound by the products. Subnormal bf16 count as 0.
#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "absorb/kernel.h"
#include "core/arithmetic.h"
#include "cpu/threads.h"
#include "cpu/transpose_avx512.h"

namespace winnow::internal::absorb {
namespace {

constexpr int kLanes = 16, kBlockColumns = 32;  // columns of a vector, of a block
constexpr int kColumns = 128, kDepth = 128;     // of a piece of weights
constexpr int kSmall = 32, kFew = 16;           // of a small piece; the most rows that take it
constexpr int kPairs = kDepth / 2;              // of k
constexpr int kRows = 12, kStripe = 8 * kRows;  // rows multiplied at a time, rows whose sums wait

struct Scratch {
  alignas(64) uint32_t panel[kColumns / kBlockColumns][kPairs][kBlockColumns];
  alignas(64) uint32_t rows[kRows][kPairs];
  alignas(64) float sums[kStripe][kColumns];
};

// Weights of one head, `depth` k by `cols` columns.
struct Piece {
  const bf16* b;     // its first element
  const bf16* next;  // of the piece that is packed next; null: it is not fetched
  int64_t b_k, b_col;
  int depth, cols;
};

__mmask32 below(int64_t n) {
  return static_cast<__mmask32>(n >= 32 ? ~0u : (1u << std::max<int64_t>(n, 0)) - 1);
}

// `count` weights of the next piece.
[[gnu::always_inline]] inline void prefetch(const bf16* row, int count) {
  for (int i = 0; i < count; i += 32) _mm_prefetch(row + i, _MM_HINT_T0);
}

// Columns that are contiguous: two rows of weights interleaved.
void pack_columns(const Piece& w, Scratch& s) {
  alignas(64) static constexpr auto kOrder = [] {
    std::array<uint16_t, 32> order{};
    for (uint16_t i = 0; i < 32; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 32);
    return order;
  }();
  const __m512i low = _mm512_load_si512(kOrder.data());
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  for (int k = 0; k < w.depth; k += 2) {
    const bf16* row = w.b + k * w.b_k;
    const bool both = k + 1 < w.depth;
    for (int i = k; w.next && i < std::min(k + 2, w.depth); ++i)
      prefetch(w.next + i * w.b_k, w.cols);
    for (int c = 0; c < w.cols; c += kBlockColumns) {
      const __mmask32 there = below(w.cols - c);
      const __m512i x = _mm512_maskz_loadu_epi16(there, row + c);
      const __m512i y =
          both ? _mm512_maskz_loadu_epi16(there, row + w.b_k + c) : _mm512_setzero_si512();
      uint32_t* to = s.panel[c / kBlockColumns][k / 2];
      _mm512_store_si512(to, _mm512_permutex2var_epi16(x, low, y));
      _mm512_store_si512(to + kLanes, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

// k that is contiguous: 16 columns by 16 pairs transposed.
void pack_depth(const Piece& w, Scratch& s) {
  for (int c = 0; c < w.cols; c += kLanes) {
    const int cols = std::min(kLanes, w.cols - c);
    for (int i = 0; w.next && i < cols; ++i) prefetch(w.next + (c + i) * w.b_col, w.depth);
    uint32_t* to = s.panel[c / kBlockColumns][0] + c % kBlockColumns;
    for (int k = 0; k < w.depth; k += 32) {
      const __mmask32 there = below(w.depth - k);
      __m512i r[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        r[i] = i < cols ? _mm512_maskz_loadu_epi16(there, w.b + (c + i) * w.b_col + k)
                        : _mm512_setzero_si512();
      cpu::transpose(r);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) _mm512_store_si512(to + (k / 2 + i) * kBlockColumns, r[i]);
    }
    if (c % kBlockColumns == 0 && c + kLanes >= w.cols)  // no columns in the block's second half
      for (int k = 0; k < ceil_div(w.depth, 2); ++k)
        _mm512_store_si512(to + k * kBlockColumns + kLanes, _mm512_setzero_si512());
  }
}

// sums[R rows][V vectors] += rows x panel. The vectors lie in V / 2 blocks of columns.
template <int R, int V>
[[gnu::always_inline]] inline void multiply(const Scratch& s, int block, int pairs, float* sums) {
  __m512 acc[R][V];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = _mm512_load_ps(sums + r * kColumns + v * kLanes);
  for (int k = 0; k < pairs; ++k) {
    __m512i b[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      b[v] = _mm512_load_si512(&s.panel[block + v / 2][k][v % 2 * kLanes]);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const __m512i a = _mm512_set1_epi32(static_cast<int>(s.rows[r][k]));
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], (__m512bh)a, (__m512bh)b[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) _mm512_store_ps(sums + r * kColumns + v * kLanes, acc[r][v]);
}

// R rows of the left operand, as pairs of k, by all columns of the piece. One row alone takes four
// blocks at a time: two sums would wait for each other.
template <int R>
void multiply_rows(const bf16* a, int64_t a_row, const Piece& w, Scratch& s, float* sums) {
  const int pairs = ceil_div(w.depth, 2);
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < w.depth; k += 32)
      _mm512_store_si512(&s.rows[r][k / 2],
                         _mm512_maskz_loadu_epi16(below(w.depth - k), a + r * a_row + k));
  const int blocks = ceil_div(w.cols, kBlockColumns);
  if constexpr (R == 1)
    if (blocks == kColumns / kBlockColumns) return multiply<R, 8>(s, 0, pairs, sums);
  for (int block = 0; block < blocks; ++block)
    multiply<R, 2>(s, block, pairs, sums + block * kBlockColumns);
}

// Rounded to nearest even; infinities and NaN stay what they are.
__m256i to_bf16(__m512 x) {
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
}

void put_rows(const float* sums, int64_t rows, int cols, bf16* out, int64_t out_row) {
  for (int64_t r = 0; r < rows; ++r)
    for (int c = 0; c < cols; c += kLanes)
      _mm256_mask_storeu_epi16(out + r * out_row + c, static_cast<__mmask16>(below(cols - c)),
                               to_bf16(_mm512_load_ps(sums + r * kColumns + c)));
}

void pack(const Piece& w, Scratch& s) {
  if (w.b_col == 1) pack_columns(w, s);
  else pack_depth(w, s);
}

// Rows by a packed piece; sums of row r from sums + r * kColumns on. The next rows are fetched,
// since rows of all heads lie a power of two apart as well.
void multiply_all(const bf16* a, const Product& p, const Piece& w, Scratch& s, float* sums,
                  int64_t rows) {
  for (int64_t r = 0; r < rows;) {
    const bf16* from = a + r * p.a_row;
    for (int64_t i = r + kRows; i < std::min(r + 2 * kRows, rows); ++i)
      prefetch(a + i * p.a_row, w.depth);
    float* to = sums + r * kColumns;
    if (rows - r >= kRows) {
      multiply_rows<kRows>(from, p.a_row, w, s, to);
      r += kRows;
    } else if (rows - r >= 4) {
      multiply_rows<4>(from, p.a_row, w, s, to);
      r += 4;
    } else {
      multiply_rows<1>(from, p.a_row, w, s, to);
      r += 1;
    }
  }
}

// Few rows: pieces of 32 columns, or of 32 k where columns are contiguous, of one head after the
// other, which are neighbours in [L, H, P].
void multiply_few(const Product& p, int64_t first, int64_t begin, int64_t end) {
  Scratch s;
  const int columns = p.b_col == 1 ? kColumns : kSmall, step = p.b_col == 1 ? kSmall : kDepth;
  const auto cols = static_cast<int>(std::min<int64_t>(columns, p.cols - first));
  const auto weights = [&](int64_t head, int64_t k) {
    return p.b + head * p.b_head + first * p.b_col + k * p.b_k;
  };
  const auto sums = [&](int64_t head) { return s.sums[(head - begin) * p.rows]; };
  std::memset(s.sums, 0, static_cast<size_t>((end - begin) * p.rows) * sizeof(s.sums[0]));
  for (int64_t k = 0; k < p.depth; k += step)
    for (int64_t head = begin; head < end; ++head) {
      const auto depth = static_cast<int>(std::min<int64_t>(step, p.depth - k));
      const bool more = k + 2 * step <= p.depth;
      const bf16* next = head + 1 < end ? weights(head + 1, k)
                         : more         ? weights(begin, k + step)
                                        : nullptr;
      const Piece w{weights(head, k), next, p.b_k, p.b_col, depth, cols};
      pack(w, s);
      multiply_all(p.a + head * p.a_head + k, p, w, s, sums(head), p.rows);
    }
  for (int64_t head = begin; head < end; ++head)
    put_rows(sums(head), p.rows, cols, p.out + head * p.out_head + first, p.out_row);
}

// Many rows of one head: each piece of 128 by 128 is packed once for 96 of them, or for all if it
// has the whole depth.
void multiply_many(const Product& p, int64_t first, int64_t head) {
  Scratch s;
  // Heads to that of this worker's next task, or about so many.
  const int64_t ahead = cpu::threads();
  const auto cols = static_cast<int>(std::min<int64_t>(kColumns, p.cols - first));
  int64_t packed = -1;
  for (int64_t top = 0; top < p.rows; top += kStripe) {
    const int64_t rows = std::min<int64_t>(kStripe, p.rows - top);
    std::memset(s.sums, 0, static_cast<size_t>(rows) * sizeof(s.sums[0]));
    for (int64_t k = 0; k < p.depth; k += kDepth) {
      const auto depth = static_cast<int>(std::min<int64_t>(kDepth, p.depth - k));
      const bf16* column = p.b + head * p.b_head + first * p.b_col;  // there only if k is
      Piece w{column + k * p.b_k, nullptr, p.b_k, p.b_col, depth, cols};
      if (k + 2 * kDepth <= p.depth) w.next = w.b + kDepth * p.b_k;
      else if (k + kDepth >= p.depth && head + ahead < p.heads) w.next = column + ahead * p.b_head;
      if (packed != k) pack(w, s);
      packed = k;
      multiply_all(p.a + top * p.a_row + head * p.a_head + k, p, w, s, s.sums[0], rows);
    }
    put_rows(s.sums[0], rows, cols, p.out + top * p.out_row + head * p.out_head + first, p.out_row);
  }
}

void multiply_heads(const Product& p) {
  if (p.rows > kFew) {
    cpu::parallel_for(p.heads * ceil_div<int64_t>(p.cols, kColumns), [&](int64_t task, int) {
      multiply_many(p, task / p.heads * kColumns, task % p.heads);
    });
    return;
  }
  const int64_t columns = p.b_col == 1 ? kColumns : kSmall, blocks = ceil_div(p.cols, columns);
  const int64_t most = std::min<int64_t>(16, kStripe / p.rows);
  const int64_t some = std::clamp<int64_t>(p.heads * blocks / (8 * cpu::threads()), 1, most);
  const int64_t groups = ceil_div(p.heads, some);
  cpu::parallel_for(groups * blocks, [&](int64_t task, int) {
    const int64_t begin = task % groups * some;
    multiply_few(p, task / groups * columns, begin, std::min(begin + some, p.heads));
  });
}

}  // namespace

void avx512bf16(const Params& p) noexcept {
  for (int i = 0; i < p.product_count; ++i)
    if (p.products[i].rows > 0) multiply_heads(p.products[i]);
  simd::copies(p);
}

}  // namespace winnow::internal::absorb
