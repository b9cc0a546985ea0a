// absorb with portable vectors: a small matrix product per head, parallel over heads and blocks of
// columns.
//
// A task owns `kWidth` = 2 vectors of columns of one head. It packs that slice of the weights into
// a panel of floats once, and runs all rows over it: a block of rows x 2 vectors of sums stays in
// registers while k advances. Sums are one fp32 chain per element, k ascending, so a row's result
// does not depend on the other rows, the threads or the block it falls into.
//
// Budget per step of k and block of 12 rows: 24 multiply-adds for 2 vector loads (panel, L2) and 12
// broadcasts (rows, L1): bound by the multiply-adds. With one row the weights are read once, at
// about 4 B a cycle and core: bound by memory. Scratch: 96 KB of stack per worker.
#include <algorithm>
#include <cstring>

#include "absorb/kernel.h"
#include "core/arithmetic.h"
#include "core/formats.h"
#include "cpu/threads.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "absorb/simd.cpp"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
//
#include "cpu/formats_simd.h"

HWY_BEFORE_NAMESPACE();
namespace winnow::internal::absorb::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
namespace hs = cpu::HWY_NAMESPACE;

struct Config {
  using D = hn::CappedTag<float, 16>;
  static constexpr int kMaxWidth = 32;  // 2 vectors of columns
  static constexpr int kDepth = 512;    // of the panel; deeper products take several
  static constexpr int kRows =
      (HWY_TARGET <= HWY_AVX3 || HWY_ARCH_ARM_A64) ? 12 : 6;  // 32 registers, or 16
  static constexpr int kStripe = 64;                          // rows whose sums wait between panels
};

struct Scratch {
  HWY_ALIGN float panel[Config::kDepth * Config::kMaxWidth];
  HWY_ALIGN float rows[Config::kRows * Config::kDepth];
  HWY_ALIGN float sums[Config::kStripe * Config::kMaxWidth];
};

// Four columns, contiguous along k, into panel[k][0..3]: pairs of k travel as one 32-bit lane
// through a 4 x 4 transpose. Returns how many k are done (a multiple of 8).
#if HWY_TARGET == HWY_SCALAR
HWY_INLINE int64_t pack_transposed(const bf16*, int64_t, int64_t, float*, int64_t) { return 0; }
#else
HWY_INLINE int64_t pack_transposed(const bf16* from, int64_t col_stride, int64_t depth, float* to,
                                   int64_t width) {
  const hn::FixedTag<uint32_t, 4> d;
  const hn::FixedTag<uint64_t, 2> d64;
  const hn::FixedTag<float, 4> df;
  const auto high = hn::Set(d, 0xffff0000u);
  const auto load = [&](int64_t col, int64_t k) HWY_ATTR {
    const hn::FixedTag<uint16_t, 8> dh;
    return hn::BitCast(
        d, hn::LoadU(dh, reinterpret_cast<const uint16_t*>(from + col * col_stride + k)));
  };
  int64_t k = 0;
  for (; k + 8 <= depth; k += 8) {
    const auto r0 = load(0, k), r1 = load(1, k), r2 = load(2, k), r3 = load(3, k);
    const auto a = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));  // 00 10 01 11
    const auto b = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
    const auto c = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
    const auto e = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
    const hn::Vec<decltype(d)> pairs[4] = {hn::BitCast(d, hn::InterleaveLower(d64, a, b)),
                                           hn::BitCast(d, hn::InterleaveUpper(d64, a, b)),
                                           hn::BitCast(d, hn::InterleaveLower(d64, c, e)),
                                           hn::BitCast(d, hn::InterleaveUpper(d64, c, e))};
    for (int i = 0; i < 4; ++i) {
      hn::StoreU(hn::BitCast(df, hn::ShiftLeft<16>(pairs[i])), df, to + (k + 2 * i) * width);
      hn::StoreU(hn::BitCast(df, hn::And(pairs[i], high)), df, to + (k + 2 * i + 1) * width);
    }
  }
  return k;
}
#endif

// panel[k][col] = b[first_k + k, head, first_col + col], zeros in the columns after the last.
void pack(const Product& p, const bf16* b, int64_t depth, int64_t cols, float* panel) {
  const Config::D df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), width = 2 * lanes;
  if (p.b_col == 1 && cols == width) {
    for (int64_t k = 0; k < depth; ++k) {
      hn::Store(hs::load_bf16(df, b + k * p.b_k), df, panel + k * width);
      hn::Store(hs::load_bf16(df, b + k * p.b_k + lanes), df, panel + k * width + lanes);
    }
    return;
  }
  if (cols < width) std::memset(panel, 0, depth * width * sizeof(float));
  int64_t col = 0;
  if (p.b_k == 1)
    for (; col + 4 <= cols; col += 4) {
      const bf16* from = b + col * p.b_col;
      const int64_t done = pack_transposed(from, p.b_col, depth, panel + col, width);
      for (int64_t k = done; k < depth; ++k)
        for (int64_t c = 0; c < 4; ++c)
          panel[k * width + col + c] = to_float(from[c * p.b_col + k]);
    }
  for (int64_t k = 0; k < depth; ++k)
    for (int64_t c = col; c < cols; ++c)
      panel[k * width + c] = to_float(b[k * p.b_k + c * p.b_col]);
}

// sums[kRows][width] += rows[kRows][depth] x panel[depth][width], in registers.
template <int kRows>
HWY_INLINE void multiply_block(const float* rows, const float* panel, int64_t depth, float* sums) {
  const Config::D df;
  const size_t lanes = hn::Lanes(df);
  hn::Vec<Config::D> low[kRows], high[kRows];
  for (int r = 0; r < kRows; ++r) {
    low[r] = hn::Load(df, sums + r * 2 * lanes);
    high[r] = hn::Load(df, sums + r * 2 * lanes + lanes);
  }
  for (int64_t k = 0; k < depth; ++k) {
    const auto b0 = hn::Load(df, panel + k * 2 * lanes);
    const auto b1 = hn::Load(df, panel + k * 2 * lanes + lanes);
    for (int r = 0; r < kRows; ++r) {
      const auto a = hn::Set(df, rows[r * Config::kDepth + k]);
      low[r] = hn::MulAdd(a, b0, low[r]);
      high[r] = hn::MulAdd(a, b1, high[r]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    hn::Store(low[r], df, sums + r * 2 * lanes);
    hn::Store(high[r], df, sums + r * 2 * lanes + lanes);
  }
}

// A block of rows as floats.
template <int kRows>
HWY_INLINE void run_block(const bf16* a, int64_t a_row, int64_t depth, Scratch& s, float* sums) {
  const Config::D df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  for (int r = 0; r < kRows; ++r) {
    int64_t k = 0;
    for (; k + lanes <= depth; k += lanes)
      hn::Store(hs::load_bf16(df, a + r * a_row + k), df, s.rows + r * Config::kDepth + k);
    for (; k < depth; ++k) s.rows[r * Config::kDepth + k] = to_float(a[r * a_row + k]);
  }
  multiply_block<kRows>(s.rows, s.panel, depth, sums);
}

// Rounds rows of sums to the output.
void put_rows(const float* sums, int64_t rows, int64_t cols, bf16* out, int64_t out_row) {
  const Config::D df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df)), width = 2 * lanes;
  for (int64_t r = 0; r < rows; ++r) {
    int64_t c = 0;
    for (; c + lanes <= cols; c += lanes)
      hs::store_bf16(df, hn::Load(df, sums + r * width + c), out + r * out_row + c);
    for (; c < cols; ++c) out[r * out_row + c] = to_bf16(sums[r * width + c]);
  }
}

// One head's columns [first, first + width): task = head * blocks + block.
void multiply_columns(const Product& p, int64_t task) {
  const int64_t width = 2 * static_cast<int64_t>(hn::Lanes(Config::D()));
  const int64_t blocks = ceil_div(p.cols, width);
  const int64_t head = task / blocks, first = task % blocks * width;
  const int64_t cols = std::min(width, p.cols - first);
  Scratch s;
  int64_t packed = -1;  // the depth at which the panel starts: one panel is packed once only
  for (int64_t top = 0; top < p.rows; top += Config::kStripe) {
    const int64_t rows = std::min<int64_t>(Config::kStripe, p.rows - top);
    std::memset(s.sums, 0, rows * width * sizeof(float));
    for (int64_t k = 0; k < p.depth; k += Config::kDepth) {
      const int64_t depth = std::min<int64_t>(Config::kDepth, p.depth - k);
      if (packed != k)
        pack(p, p.b + k * p.b_k + head * p.b_head + first * p.b_col, depth, cols, s.panel);
      packed = k;
      for (int64_t r = 0; r < rows;) {
        const bf16* a = p.a + (top + r) * p.a_row + head * p.a_head + k;
        float* sums = s.sums + r * width;
        if (rows - r >= Config::kRows) {
          run_block<Config::kRows>(a, p.a_row, depth, s, sums);
          r += Config::kRows;
        } else if (rows - r >= 4) {
          run_block<4>(a, p.a_row, depth, s, sums);
          r += 4;
        } else {
          run_block<1>(a, p.a_row, depth, s, sums);
          r += 1;
        }
      }
    }
    put_rows(s.sums, rows, cols, p.out + top * p.out_row + head * p.out_head + first, p.out_row);
  }
}

int64_t columns_of_task() { return 2 * static_cast<int64_t>(hn::Lanes(Config::D())); }

// One row of weights, block by block of the scales.
void dequantize_row(const DequantizeParams& p, int64_t row) {
  const Config::D df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(df));
  const auto* codes = reinterpret_cast<const uint8_t*>(p.weight + row * p.weight_row);
  bf16* out = p.out + row * p.out_row;
  for (int64_t first = 0; first < p.cols; first += kBlock) {
    const int64_t last = std::min(first + kBlock, p.cols);
    const float scale = p.scale[row / kBlock * p.scale_row + first / kBlock * p.scale_col];
    const auto s = hn::Set(df, scale);
    int64_t c = first;
    for (; c + lanes <= last; c += lanes)
      hs::store_bf16(df, hn::Mul(hs::load_e4m3(df, codes + c), s), out + c);
    for (; c < last; ++c) out[c] = to_bf16(to_float(e4m3{codes[c]}) * scale);
  }
}

}  // namespace winnow::internal::absorb::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace winnow::internal::absorb {

HWY_EXPORT(multiply_columns);
HWY_EXPORT(columns_of_task);
HWY_EXPORT(dequantize_row);

namespace simd {

namespace {

// Tiles of 32 x 32 over the outer and inner dimension, so that a transposing copy (a checkpoint's
// weight into [L, H, P]) uses every line it touches while that is in L1.
void copy(const Copy& c) {
  constexpr int64_t kTile = 32;
  const int64_t tiles = ceil_div(c.shape[0], kTile);
  cpu::parallel_for(tiles * c.shape[1], [&](int64_t task, int) {
    const int64_t j = task % c.shape[1], first = task / c.shape[1] * kTile;
    const int64_t last = std::min(first + kTile, c.shape[0]);
    const bf16* from = c.from + j * c.from_stride[1];
    bf16* to = c.to + j * c.to_stride[1];
    for (int64_t tile = 0; tile < c.shape[2]; tile += kTile)
      for (int64_t i = first; i < last; ++i)
        for (int64_t k = tile; k < std::min(tile + kTile, c.shape[2]); ++k)
          to[i * c.to_stride[0] + k * c.to_stride[2]] =
              from[i * c.from_stride[0] + k * c.from_stride[2]];
  });
}

}  // namespace

void absorb(const Params& p) noexcept {
  const int64_t width = HWY_DYNAMIC_DISPATCH(columns_of_task)();
  for (int i = 0; i < p.product_count; ++i) {
    const Product& product = p.products[i];
    if (product.rows == 0) continue;
    cpu::parallel_for(product.heads * ceil_div(product.cols, width), [&](int64_t task, int) {
      HWY_DYNAMIC_DISPATCH(multiply_columns)(product, task);
    });
  }
  copies(p);
}

void copies(const Params& p) noexcept {
  for (int i = 0; i < p.copy_count; ++i) copy(p.copies[i]);
}

void dequantize(const DequantizeParams& p) noexcept {
  cpu::parallel_for(p.rows, [&](int64_t row, int) {
    HWY_DYNAMIC_DISPATCH(dequantize_row)(p, row);
  });
}

}  // namespace simd
}  // namespace winnow::internal::absorb
#endif  // HWY_ONCE
