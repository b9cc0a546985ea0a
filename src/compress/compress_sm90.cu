// compress on the device: which kernel, and the launch. Entries of up to 8 rows: few_sm90.cu; of
// more: many_sm90.cu; without a gate, a warp per token, here.
//
// Order: entries must see the rows that were stored before the call. A paged state has a place for
// every position. In a ring that is not longer than the call's tokens and a window, a row of the
// call may take the place of one that an entry reads: of few tokens order_sm90.cuh sorts it out in
// the same launch, of many a kernel of their own copies the rows, after the entries.
#include <cuda_runtime.h>

#include "compress/kernels_sm90.h"
#include "cuda/launch.h"
#include "cuda/record.h"
#include "model/records.h"

namespace winnow::internal::compress {

namespace {

constexpr int kPieces = kMaxWidth / cuda::kWarpValues;

// A row becomes latent and record, by one warp.
__device__ __forceinline__ void finish(const Call& call, const cuda::HeldFloats<kPieces>& floats,
                                       int64_t token, bool stored, int64_t slot, int lane) {
  const Params& p = call.p;
  cuda::Held<kPieces> row;
  if (p.norm.kind == NormKind::kNone) {
#pragma unroll
    for (int c = 0; c < kPieces; ++c) row.pieces[c] = cuda::packed(floats.pieces[c]);
  } else {
    const cuda::HeldWeights<kPieces> weights(p.norm, p.width, call.norm_wide, lane);
    row = cuda::norm_held(p.norm, weights, floats, p.width, call.norm_wide, lane);
  }
  if (p.latent != nullptr)
    cuda::store_row(p.latent + token * p.latent_stride, p.width, call.latent_wide, lane, row);
  if (!stored) return;
  if (p.rope.table != nullptr) {
    const cuda::Turn turn =
        cuda::turn_of(p.rope, position_of(p, token) - p.ratio + 1, lane % cuda::kRopeLanes);
    cuda::rotate_held(p.rope, turn, p.width, row, lane);
  }
  if (p.hadamard) row.pieces[0] = cuda::hadamard(row.pieces[0], lane);
  const cuda::Spot spot = cuda::spot_of(p.cache, slot);
  with_entry(p.cache.format, [&](auto record) {
    cuda::store_record<decltype(record)>(p.quantizer, row, spot.page, spot.offset, p.cache.page,
                                         lane);
  });
}

constexpr int kRowThreads = 256;
constexpr int kMaxTokens = 32;  // of a block

// Rows that are to be stored.
struct List {
  int64_t tokens[kMaxTokens];  // whose
  float* places[kMaxTokens];   // where; null: not
};

// The rows of the first `count` of the listed tokens go to their places.
template <Load kLoad>
__device__ __forceinline__ void store_rows(const Params& p, const List& shared, int count) {
  constexpr int kEach = 4;
  const int values = static_cast<int>(values_of(p));
  const int columns = 2 * values;
  const int quads = columns / kQuad;  // of a row
  const auto threads = static_cast<int>(blockDim.x);
  for (int from = static_cast<int>(threadIdx.x); from < quads * count; from += kEach * threads) {
    Quad quad[kEach];
    float* to[kEach];
    int column[kEach];
    int64_t token[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int item = from + i * threads;
      column[i] = item % quads * kQuad;
      const bool there = item < quads * count;
      to[i] = there ? shared.places[item / quads] : nullptr;
      if (to[i] == nullptr) continue;
      token[i] = shared.tokens[item / quads];
      quad[i] = load_quad<kLoad>(p.rows, p.rows_are_bf16, token[i] * p.row_stride + column[i]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (to[i] == nullptr) continue;
      if (p.bias != nullptr && column[i] >= values) {
        const auto place = static_cast<int>(position_of(p, token[i])) % p.ratio;
        add_bias<kLoad>(quad[i], p.bias + place * p.bias_stride, column[i] - values);
      }
      __builtin_assume(__isGlobal(to[i]));
      store_quad<kLoad>(to[i] + column[i], quad[i]);
    }
  }
}

// Rows alone, of call.tokens tokens a block.
template <Load kLoad>
__global__ void __launch_bounds__(kRowThreads) copy_rows(const __grid_constant__ Call call) {
  __shared__ List list;
  const int64_t first = int64_t{blockIdx.x} * call.tokens;
  const int64_t left = call.p.tokens - first;
  const int count = left < call.tokens ? static_cast<int>(left) : call.tokens;
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread < count) {
    list.tokens[thread] = first + thread;
    list.places[thread] = own_state_row(call.p, first + thread);
  }
  __syncthreads();
  store_rows<kLoad>(call.p, list, count);
}

constexpr int kPlainWarps = 4;

// Without a gate: an entry is its token's row, by a warp.
template <Load kLoad>
__global__ void __launch_bounds__(kPlainWarps * 32) plain(const __grid_constant__ Call call) {
  const Params& p = call.p;
  const int64_t token = int64_t{blockIdx.x} * kPlainWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= p.tokens) return;
  cuda::HeldFloats<kPieces> floats;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    const int at = cuda::piece_at(c, lane);
    if (p.rows_are_bf16) {
      const bf16* row = static_cast<const bf16*>(p.rows) + token * p.row_stride;
      cuda::unpack(cuda::load_piece(row, at, p.width, false), floats.pieces[c]);
    } else {
      const float* row = static_cast<const float*>(p.rows) + token * p.row_stride;
      cuda::load_floats(row, at, p.width, kLoad == Load::kFloats, floats.pieces[c]);
    }
  }
  if (!closes(p, token)) return;
  const int64_t slot = p.cache.data == nullptr ? -1 : p.slots[token * p.slot_stride];
  bool stored = slot >= 0 && slot < p.cache.pages * p.cache.page;
  if (p.rope.table != nullptr) stored = stored && core::in_table(p.rope, position_of(p, token));
  if (stored || p.latent != nullptr) finish(call, floats, token, stored, slot, lane);
}

// The usual call of V4.1's layers of ratio 1: rows of floats, RMS with weights, RoPE over pairs in
// place last, V4's records in pages of a power of two; all of it found by products of 32 bits.
using PlainRecord = V4Fp8;
bool is_usual(const Call& call) {
  const Params& p = call.p;
  const auto fits = cuda::fits_product;
  return p.ratio == 1 && p.cache.data != nullptr && p.cache.format == PlainRecord::kFormat &&
         cuda::is_plain(p.norm) && p.rope.table != nullptr && cuda::is_wide(p.rope) &&
         !p.rope.half && !p.rope.first && !p.hadamard && (p.cache.page & (p.cache.page - 1)) == 0 &&
         (p.latent == nullptr || call.latent_wide) && fits(p.tokens) && fits(p.row_stride) &&
         fits(p.position_stride) && fits(p.slot_stride) && fits(p.rope.positions) &&
         fits(p.rope.position_stride) && fits(p.cache.pages * p.cache.page) && fits(p.cache.stride);
}

// A token that is not stored goes through all but the stores: the compiler would move the loads of
// its row after an earlier exit, which waits for position and slot.
__global__ void __launch_bounds__(kPlainWarps * 32) plain_usual(const __grid_constant__ Call call) {
  const Params& p = call.p;
  const uint32_t token = blockIdx.x * kPlainWarps + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (token >= p.tokens) return;
  const int32_t position = *cuda::at_product(p.positions, token, p.position_stride);
  const int64_t slot = *cuda::at_product(p.slots, token, p.slot_stride);
  const auto* rows = static_cast<const float*>(p.rows);
  const float* row = cuda::at_product(rows, token, p.row_stride) + lane * cuda::kPiece;
  const float* weights = p.norm.weight + lane * cuda::kPiece;
  float values[kPieces][cuda::kPiece], weight[kPieces][cuda::kPiece];
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
    cuda::load_floats(row + c * cuda::kWarpValues, 0, cuda::kPiece, true, values[c]);
    cuda::load_floats(weights + c * cuda::kWarpValues, 0, cuda::kPiece, true, weight[c]);
  }
  const bool in_table = static_cast<uint32_t>(position) < static_cast<uint32_t>(p.rope.positions);
  const auto room = static_cast<uint64_t>(p.cache.pages * p.cache.page);
  const bool stored = in_table && static_cast<uint64_t>(slot) < room;
  const bool turns = lane >= 32 - cuda::kRopeLanes;
  constexpr int kPairs = cuda::kPiece / 2;
  float cosine[kPairs] = {}, sine[kPairs] = {};
  if (stored && turns) {
    core::RopeParams rope = p.rope;  // from the position on
    rope.table =
        cuda::at_product(p.rope.table, static_cast<uint32_t>(position), p.rope.position_stride);
    cuda::load_turns<true>(rope, 0, lane % cuda::kRopeLanes * kPairs, cosine, sine);
  }
  const float sum =
      cuda::warp_sum(__fadd_rn(cuda::add_squares(0, values[0]), cuda::add_squares(0, values[1])));
  const float inverse = cuda::inverse_of(p.norm, sum, kMaxWidth);
  cuda::Held<kPieces> out;
#pragma unroll
  for (int c = 0; c < kPieces; ++c) {
#pragma unroll
    for (int i = 0; i < cuda::kPiece; ++i)
      values[c][i] = __fmul_rn(__fmul_rn(values[c][i], inverse), weight[c][i]);
    out.pieces[c] = cuda::packed(values[c]);
  }
  if (position < 0) return;
  if (p.latent != nullptr)
#pragma unroll
    for (int c = 0; c < kPieces; ++c)
      cuda::store16(p.latent + token * p.latent_stride + cuda::piece_at(c, lane), out.pieces[c]);
  if (turns) out.pieces[1] = cuda::turned_pairs(out.pieces[1], p.rope.inverse, cosine, sine);
  if (!stored) return;
  const auto place = static_cast<uint32_t>(slot);
  const auto size = static_cast<uint32_t>(p.cache.page);
  std::byte* page =
      cuda::at_product(p.cache.data, place >> (31 - __clz(p.cache.page)), p.cache.stride);
  cuda::store_record<PlainRecord>(p.quantizer, out, page, place & (size - 1), p.cache.page, lane);
}

template <Load kLoad>
void launch_plain(const Call& call) {
  const auto blocks = static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{kPlainWarps}));
  const bool usual = kLoad == Load::kFloats && is_usual(call);
  const auto kernel = usual ? plain_usual : plain<kLoad>;
  kernel<<<blocks, kPlainWarps * 32, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad>
void launch_rows(Call call) {
  const int64_t quads = 2 * values_of(call.p) / kQuad;
  const int64_t rows = 8 * kRowThreads / quads;  // 8 quads a thread
  call.tokens = static_cast<int>(rows < 1 ? 1 : rows < kMaxTokens ? rows : kMaxTokens);
  const auto blocks = static_cast<unsigned>(ceil_div(call.p.tokens, int64_t{call.tokens}));
  copy_rows<kLoad><<<blocks, kRowThreads, 0, cuda::stream_of(call.p.device)>>>(call);
  cuda::keep_error(cudaGetLastError());
}

template <Load kLoad>
void launch_for(Call call) {
  if (!call.p.gate) return launch_plain<kLoad>(call);
  const Params& p = call.p;
  const bool few = rows_of_entry(p) <= kFewRows;
  // Of few tokens each by itself, for the shortest wait; of many as many as an entry has.
  const bool many = p.tokens > 512;
  // Positions of one request in the call and in the windows before them share no place.
  const bool apart = !p.ring || p.tokens + rows_of_entry(p) - 1 <= p.block;
  call.ordered = !many && !apart;
  call.rows = !many || apart;
  if (few) {
    few_rows(call, kLoad, many);
  } else {
    if (many) call.tokens = p.ratio;
    many_rows(call, kLoad);
  }
  if (!call.rows && p.state != nullptr) launch_rows<kLoad>(call);
}

// Whether four values of any row, of the state and of the bias lie together.
bool is_wide(const Params& p) {
  const auto aligned = [](const void* data, int64_t stride, int64_t size) {
    return reinterpret_cast<uintptr_t>(data) % (kQuad * size) == 0 && stride % kQuad == 0;
  };
  return aligned(p.rows, p.row_stride, p.rows_are_bf16 ? 2 : 4) &&
         aligned(p.bias, p.bias_stride, 4) && aligned(p.state, p.state_stride, 4) &&
         p.block_stride % kQuad == 0;
}

}  // namespace

void sm90(const Params& p) noexcept {
  if (p.tokens == 0) return;
  Call call{p, Divisor::of(p.block)};
  call.norm_wide = cuda::is_wide(p.norm);
  call.latent_wide = cuda::is_wide(p.latent, p.latent_stride * 2);
  if (!is_wide(p)) launch_for<Load::kAny>(call);
  else if (p.rows_are_bf16) launch_for<Load::kBf16>(call);
  else launch_for<Load::kFloats>(call);
}

}  // namespace winnow::internal::compress
