// attend_mha on the device: a block per 64 tokens, head and 128 columns of v; four warps of 16
// tokens each.
//
// The tile walks the rows that any of its tokens wants, 64 at a time: logits by m16n8k16 on the
// tensor cores, an online softmax in registers with the rows a token does not want masked out, then
// the weighted values. Keys come in pieces of 128 columns, then the values, through a ring of three
// stages, two copied ahead. Rows are gathered by number, so sparse and causal calls share the path.
// Budget: 2 * 64 * 64 * (d_qk + d_v) FLOP a block of keys against 128 * (d_qk + d_v) B of shared
// memory filled.
#include <cuda_runtime.h>

#include <cfloat>

#include "core/arithmetic.h"
#include "core/formats.h"
#include "cuda/hopper.h"
#include "cuda/launch.h"
#include "cuda/mma.h"
#include "mha/dense_sm90.h"
#include "mha/mha_sm90.cuh"

namespace winnow::internal::mha {

namespace sm90 {
namespace {

constexpr int kPiece = 128;  // columns of k or v in a stage
constexpr int kWidth = kPiece + cuda::kTilePad;
constexpr int kStages = 3;
constexpr int64_t kMostResident = 512;  // longest queries that stay in shared memory
static_assert(kTokens == 16 * kThreads / 32 && kKeys == 64);

struct SharedMemory {
  alignas(16) bf16 stages[kStages][kKeys * kWidth];
  SetMemory set;
};

constexpr int bytes_of(int q_width) {
  return static_cast<int>(sizeof(SharedMemory)) +
         kTokens * q_width * static_cast<int>(sizeof(bf16));
}

struct Task {
  Params p;
  bool fast_q, fast_k, fast_v;
  int pieces;       // of a key
  int q_width;      // of a row of queries in shared memory; 0: they are read where they are
  int64_t tiles;    // of tokens
  int64_t v_tiles;  // of columns of v
};

struct Place {
  int64_t first, head, column;  // token, head, column of v
};

// A query fragment of this warp's 16 tokens, from shared memory or from where the query is.
__device__ void load_query(uint32_t (&r)[4], const Task& task, const Place& at, const bf16* q,
                           int64_t col) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16;
  if (task.q_width > 0) {
    cuda::load_a(r, q, task.q_width, row, static_cast<int>(col));
    return;
  }
  for (int i = 0; i < 4; ++i) {
    const int64_t t = at.first + row + lane / 4 + i % 2 * 8, c = col + lane % 4 * 2 + i / 2 * 8;
    const bf16* from = task.p.q + t * task.p.q_token_stride + at.head * task.p.q_head_stride + c;
    const bool in = t < task.p.tokens;
    const uint32_t low = in && c < task.p.d_qk ? from[0].bits : 0;
    const uint32_t high = in && c + 1 < task.p.d_qk ? from[1].bits : 0;
    r[i] = low | high << 16;
  }
}

// Copies columns [col, col + 128) of the block's rows of k or v; zeros where there are none.
struct Rows {
  const bf16* data;
  int64_t stride, columns;
  bool fast;
};
__device__ void load_piece(bf16* stage, const Block& block, const Rows& rows, int64_t col) {
  constexpr int kVectors = kPiece / 8;
  for (int i = threadIdx.x; i < kKeys * kVectors; i += kThreads) {
    const int key = i / kVectors, at = i % kVectors * 8;
    const int64_t row = block.rows[key];
    const int64_t valid = row >= 0 ? rows.columns - col - at : 0;
    const bf16* from = valid > 0 ? rows.data + row * rows.stride + col + at : rows.data;
    cuda::copy8(stage + key * kWidth + at, {from, 1, rows.fast}, valid);
  }
}

// Issues copies in the order in which they are used: a block's pieces of k, then of v.
class Loader {
 public:
  __device__ Loader(const Task& task, SharedMemory& shared, const Place& at)
      : shared_(shared), walk_(task.p, shared.set, at.first), pieces_(task.pieces) {
    const Params& p = task.p;
    k_ = {p.k + at.head * p.k_head_stride, p.k_row_stride, p.d_qk, task.fast_k};
    v_ = {p.v + at.head * p.v_head_stride, p.v_row_stride, p.d_v, task.fast_v};
    column_ = at.column;
    step_ = pieces_ + 1;
  }

  __device__ void issue() {
    if (step_ > pieces_) {
      more_ = more_ && walk_.next(blocks_ % kSlots);
      blocks_ += more_;
      step_ = 0;
    }
    if (more_) {
      const Block& block = shared_.set.blocks[(blocks_ - 1) % kSlots];
      const bool keys = step_ < pieces_;
      load_piece(shared_.stages[count_ % kStages], block, keys ? k_ : v_,
                 keys ? int64_t{step_} * kPiece : column_);
    }
    cuda::copy_commit();
    ++count_;
    ++step_;
  }
  __device__ int blocks() const { return blocks_; }  // found so far

 private:
  SharedMemory& shared_;
  Walk walk_;
  Rows k_, v_;
  int64_t column_;
  int pieces_, step_, blocks_ = 0, count_ = 0;
  bool more_ = true;
};

// This thread's part of a tile: rows lane / 4 and + 8 of its warp, columns lane % 4 * 2 and + 1 of
// every eight.
struct Softmax {
  float max[2] = {-FLT_MAX, -FLT_MAX}, sum[2] = {};  // sum: of this thread's columns
};

// Logits to weights: scales, adds the bias, masks what the token does not want, and brings what was
// summed up before to the new maximum.
__device__ void weigh(const Task& task, const Place& at, const Block& block, float (&s)[8][4],
                      Softmax& soft, float (&out)[16][4]) {
  const Params& p = task.p;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int token = 16 * warp + lane / 4 + 8 * r;
    const int64_t t = at.first + token;
    const uint64_t wanted = block.wanted[token];
    const int64_t start = p.bias && t < p.tokens ? start_of(p, t) : 0;
    float max = soft.max[r];
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int key = 8 * n + lane % 4 * 2 + c;
        float& x = s[n][2 * r + c];
        x *= p.scale;
        if (!(wanted >> key & 1)) {
          x = -INFINITY;
          continue;
        }
        if (p.bias) x += bias_of(p, t, block.rows[key] - start);
        if (x > FLT_MAX) x = FLT_MAX;  // an infinity weighs 1; NaN stays
        max = fmaxf(max, x);
      }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    const float keep = expf(soft.max[r] - max);
    soft.max[r] = max;
    soft.sum[r] *= keep;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = s[n][2 * r + c];
        x = exp2f((x - max) * kLog2e);
        soft.sum[r] += x;
      }
#pragma unroll
    for (int n = 0; n < 16; ++n) {
      out[n][2 * r] *= keep;
      out[n][2 * r + 1] *= keep;
    }
  }
}

// Whether a stage holds a NaN or infinity, which a weight of 0 would not keep out.
__device__ bool not_finite(const bf16* stage) {
  bool found = false;
  for (int i = threadIdx.x; i < kKeys * kPiece / 8; i += kThreads) {
    const auto v = *reinterpret_cast<const uint4*>(stage + i / 16 * kWidth + i % 16 * 8);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (const uint32_t w : words)
      found |= (w & 0x7f80u) == 0x7f80u || (w & 0x7f800000u) == 0x7f800000u;
  }
  return __syncthreads_or(found);
}

// out += weights * values. A weight goes in as two bf16 numbers, itself rounded and what that left
// out: 2^-17 of it is lost instead of 2^-9, which rows of few keys whose values cancel would show.
__device__ void add_values(const bf16* stage, const float (&s)[8][4], float (&out)[16][4]) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k) {
    uint32_t left[4], rest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float a = s[2 * k + i / 2][i % 2 * 2], b = s[2 * k + i / 2][i % 2 * 2 + 1];
      left[i] = cuda::pack<true>(a, b);
      rest[i] = cuda::pack<true>(a - __uint_as_float(left[i] << 16),
                                 b - __uint_as_float(left[i] & 0xffff0000u));
    }
#pragma unroll
    for (int n = 0; n < kPiece / 16; ++n) {
      uint32_t right[4];
      cuda::load_b_rows(right, stage, kWidth, 16 * n, 16 * k);
      cuda::mma_bf16(out[2 * n], left, right[0], right[1]);
      cuda::mma_bf16(out[2 * n + 1], left, right[2], right[3]);
      cuda::mma_bf16(out[2 * n], rest, right[0], right[1]);
      cuda::mma_bf16(out[2 * n + 1], rest, right[2], right[3]);
    }
  }
}

// The same one by one, leaving out what a token does not want: for stages with NaN or infinities.
__device__ void add_wanted(const bf16* stage, const Block& block, const float (&s)[8][4],
                           float (&out)[16][4]) {
  const int lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll 1
    for (int quad = 0; quad < 4; ++quad) {
      const int key = i / 2 * 8 + quad * 2 + i % 2, from = lane / 4 * 4 + quad;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float w = __shfl_sync(~0u, s[i / 2][2 * r + i % 2], from);
        if (!(block.wanted[token + 8 * r] >> key & 1)) continue;
        const bf16* v = stage + key * kWidth + lane % 4 * 2;
#pragma unroll
        for (int n = 0; n < 16; ++n) {
          out[n][2 * r] = fmaf(w, to_float(v[8 * n]), out[n][2 * r]);
          out[n][2 * r + 1] = fmaf(w, to_float(v[8 * n + 1]), out[n][2 * r + 1]);
        }
      }
    }
  }
}

__device__ void store(const Task& task, const Place& at, const Softmax& soft,
                      const float (&out)[16][4]) {
  const Params& p = task.p;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float sum = soft.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int64_t t = at.first + threadIdx.x / 32 * 16 + lane / 4 + 8 * r;
    if (t >= p.tokens) continue;
    const float whole = sum + (p.sink ? expf(p.sink[at.head] - soft.max[r]) : 0.0f);
    bf16* row = p.out + t * p.out_token_stride + at.head * p.out_head_stride;
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int64_t d = at.column + 8 * n + lane % 4 * 2 + c;
        if (d < p.d_v) row[d] = to_bf16(sum == 0 ? 0.0f : out[n][2 * r + c] / whole);
      }
    if (p.lse && at.column == 0 && lane % 4 == 0)
      p.lse[t * p.lse_token_stride + at.head * p.lse_head_stride] =
          sum == 0 ? p.empty_lse : soft.max[r] + logf(sum);
  }
}

__global__ void __launch_bounds__(kThreads, 2) attend_tiles(const __grid_constant__ Task task) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto& shared = *reinterpret_cast<SharedMemory*>(memory);
  bf16* q = reinterpret_cast<bf16*>(memory + sizeof(SharedMemory));
  const Params& p = task.p;
  // Tiles of one head run side by side and share its rows in L2; the longest of a causal call
  // first.
  const int64_t tile = task.tiles - 1 - blockIdx.x % task.tiles;
  const int64_t rest = blockIdx.x / task.tiles;
  const Place at{tile * kTokens, rest / task.v_tiles, rest % task.v_tiles * kPiece};

  // Queries stay in shared memory, zeros after their columns and tokens.
  for (int i = threadIdx.x; i < kTokens * (task.q_width / 8); i += kThreads) {
    const int row = i / (task.q_width / 8), col = i % (task.q_width / 8) * 8;
    const bf16* head = p.q + at.head * p.q_head_stride;
    const int64_t valid = at.first + row < p.tokens ? p.d_qk - col : 0;
    cuda::copy8(
        q + row * task.q_width + col,
        {valid > 0 ? head + (at.first + row) * p.q_token_stride + col : head, 1, task.fast_q},
        valid);
  }
  cuda::copy_commit();

  Loader loader(task, shared, at);
  for (int i = 0; i < kStages - 1; ++i) loader.issue();
  Softmax soft;
  float out[16][4] = {};
  int used = 0;
  for (int b = 0; b < loader.blocks(); ++b) {
    // Add up the logits, a piece of the keys at a time.
    float s[8][4] = {};
    for (int piece = 0; piece < task.pieces; ++piece, ++used) {
      cuda::copy_wait<kStages - 2>();
      __syncthreads();
      loader.issue();
      const bf16* stage = shared.stages[used % kStages];
      const int64_t base = int64_t{piece} * kPiece;
      const int depth = static_cast<int>(min(p.d_qk - base, int64_t{kPiece}));
#pragma unroll 2
      for (int k = 0; k < depth; k += 16) {
        uint32_t left[4];
        load_query(left, task, at, q, base + k);
#pragma unroll
        for (int n = 0; n < kKeys / 16; ++n) {
          uint32_t right[4];
          cuda::load_b(right, stage, kWidth, 16 * n, k);
          cuda::mma_bf16(s[2 * n], left, right[0], right[1]);
          cuda::mma_bf16(s[2 * n + 1], left, right[2], right[3]);
        }
      }
    }
    // Weigh them, and add the values.
    const Block& block = shared.set.blocks[b % kSlots];
    weigh(task, at, block, s, soft, out);
    cuda::copy_wait<kStages - 2>();
    __syncthreads();
    loader.issue();
    const bf16* stage = shared.stages[used++ % kStages];
    if (block.partial && not_finite(stage)) add_wanted(stage, block, s, out);
    else add_values(stage, s, out);
  }
  cuda::copy_wait<0>();
  store(task, at, soft, out);
}

}  // namespace
}  // namespace sm90

void tiles_sm90(const Params& p) noexcept {
  using namespace sm90;
  Task task{p};
  task.fast_q = cuda::aligned8(p.q, p.q_token_stride, p.q_head_stride);
  task.fast_k = cuda::aligned8(p.k, p.k_row_stride, p.k_head_stride);
  task.fast_v = cuda::aligned8(p.v, p.v_row_stride, p.v_head_stride);
  task.pieces = static_cast<int>(ceil_div(p.d_qk, kPiece));
  if (p.d_qk <= kMostResident)
    task.q_width = static_cast<int>(round_up(p.d_qk, 16) + cuda::kTilePad);
  task.tiles = ceil_div(p.tokens, kTokens);
  task.v_tiles = ceil_div(p.d_v, kPiece);
  // The same limit for every call: another host thread may be between it and its launch.
  constexpr int kMost = bytes_of(kMostResident + cuda::kTilePad);
  static_assert(kMost <= cuda::kMaxSharedBytes);
  cuda::keep_error(cuda::allow_shared(attend_tiles, kMost));
  const auto blocks = static_cast<unsigned>(task.tiles * p.heads * task.v_tiles);
  attend_tiles<<<blocks, kThreads, bytes_of(task.q_width), cuda::stream_of(p.device)>>>(task);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace winnow::internal::mha
