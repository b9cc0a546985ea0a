// Wide attention on Hopper: the end of an item, by both warpgroups: output, log-sum-exp, maximum.
#pragma once

#include "attend/wide_sm90/softmax.cuh"

namespace winnow::internal::attend::wide_sm90 {

// Writes O times the rows' factors, 256 columns, as bf16. Four lanes share a row: neighbours
// exchange half of what they hold of 16 columns, so that each stores 8 bytes and all of them one
// sector of 32. `halfway` is called between the two halves of the columns.
template <class Halfway>
__device__ __forceinline__ void write_sectors(const Args& args, const Work& work, float (&o)[128],
                                              const float (&factor)[2], Halfway halfway) {
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  const int lane = threadIdx.x & 31;
  const int head = work.head_begin + (warp & 3) * 16 + lane / 4;
  const bool odd = lane & 1;
  const bool exists[2] = {head < args.heads, head + 8 < args.heads};
  uint64_t to[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    to[i] = reinterpret_cast<uint64_t>(args.out + work.token * args.out_token_stride +
                                       (head + 8 * i) * args.out_head_stride + (warp / 4) * 256 +
                                       (lane & 1) * 8 + (lane & 2) * 2);
    // Without this the compiler loads and adds the stride for every store.
    asm volatile("" : "+l"(to[i]));
  }
  // 16 columns at a time.
#pragma unroll
  for (int c = 0; c < 16; c++) {
    if (c == 8) halfway();
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float* x = o + c * 8 + 2 * i;
      const uint32_t low = pack<true>(x[0] * factor[i], x[1] * factor[i]);
      const uint32_t high = pack<true>(x[4] * factor[i], x[5] * factor[i]);
      const uint32_t other = __shfl_xor_sync(~0u, odd ? low : high, 1);
      if (exists[i])
        __stcs(reinterpret_cast<uint2*>(to[i] + c * 32),
               odd ? make_uint2(other, high) : make_uint2(low, other));
    }
    // Keeps the compiler from preparing all stores before the first.
    if (c % 2) asm volatile("" ::: "memory");
  }
}

__device__ __forceinline__ uint4 load_16(uint32_t from) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3},[%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(from)
               : "memory");
  return x;
}

// Writes the same in pieces of 64 or 32 columns, whole lines of 128 bytes or halves of them. A
// piece goes through shared memory: 16 rows of kColumns at `stage`, which this warp alone uses.
template <int kColumns, class Halfway>
__device__ __forceinline__ void write_pieces(const Args& args, const Work& work, float (&o)[128],
                                             const float (&factor)[2], uint32_t stage,
                                             Halfway halfway) {
  // Of 16 bytes, in a row; rows that a load or store of the warp takes.
  constexpr uint32_t kChunks = kColumns / 8, kRows = 32 / kChunks;
  const int warp = __shfl_sync(~0u, (int)threadIdx.x / 32, 0);
  const uint32_t lane = threadIdx.x & 31;
  const auto at = [&](uint32_t row, uint32_t chunk) {
    return stage + (row * kChunks + (chunk ^ (row * kChunks / 8 % kChunks))) * 16;
  };
  const int head = work.head_begin + (warp & 3) * 16 + static_cast<int>(lane / kChunks);
  const auto to = reinterpret_cast<uint64_t>(args.out + work.token * args.out_token_stride +
                                             head * args.out_head_stride + (warp / 4) * 256 +
                                             lane % kChunks * 8);
  const int64_t rows_bytes = args.out_head_stride * int64_t{2 * kRows};
  // Words are made for one store at a time: with all of a piece ready before the first, ptxas
  // serialises the products (C7513).
#pragma unroll
  for (int c = 0; c < 256 / kColumns; c++) {
    if (c == 128 / kColumns) halfway();
#pragma unroll
    for (int i = 0; i < kColumns / 16; i++) {
      const float* x = o + c * (kColumns / 2) + i * 8;
      stsm4(at(lane & 15, 2 * i + (lane >> 4)), pack<true>(x[0] * factor[0], x[1] * factor[0]),
            pack<true>(x[2] * factor[1], x[3] * factor[1]),
            pack<true>(x[4] * factor[0], x[5] * factor[0]),
            pack<true>(x[6] * factor[1], x[7] * factor[1]));
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < int{16 / kRows}; k++) {
      const uint4 x = load_16(at(k * kRows + lane / kChunks, lane % kChunks));
      if (head + k * int{kRows} < args.heads)
        __stcs(reinterpret_cast<uint4*>(to + k * rows_bytes + c * (2 * kColumns)), x);
    }
    __syncwarp();
  }
}

// The sinks of a thread's two rows; -inf weighs nothing.
__device__ __forceinline__ void load_sinks(const Args& args, const Work& work, float (&sink)[2]) {
  const int head = work.head_begin + (threadIdx.x / 32 & 3) * 16 + (threadIdx.x & 31) / 4;
#pragma unroll
  for (int i = 0; i < 2; i++)
    sink[i] = args.sink && head + 8 * i < args.heads ? __ldg(args.sink + head + 8 * i) : -INFINITY;
}

// Log-sum-exp and maximum of a thread's rows, by two lanes of the four that share them.
template <class Family>
__device__ __forceinline__ void write_sums(Smem<Family>& smem, const Args& args, const Work& work,
                                           const TwoRows& rows) {
  const int lane = threadIdx.x & 31;
  const int row = (threadIdx.x / 32 & 3) * 16 + lane / 4 + (lane & 1) * 8;
  const int head = work.head_begin + row;
  if ((lane & 2) != 0 || head >= args.heads) return;
  const float row_sum = smem.row_sum[work.parity][0][row] + smem.row_sum[work.parity][1][row];
  const float max_logit =
      fmaxf(smem.max_logit[work.parity][0][row], smem.max_logit[work.parity][1][row]);
  const float reference = lane & 1 ? rows.reference[1] : rows.reference[0];
  // NaN is not empty.
  const bool empty = row_sum == 0;
  if (args.lse)
    args.lse[work.token * args.lse_token_stride + head * args.lse_head_stride] =
        empty                 ? args.empty_lse
        : max_logit > FLT_MAX ? INFINITY
                              : (log2f(row_sum) + reference) * kLn2;
  if (args.max_logit)
    args.max_logit[work.token * args.max_token_stride + head * args.max_head_stride] =
        empty                ? -INFINITY
        : row_sum == row_sum ? max_logit * kLn2
                             : row_sum;
}

// The end of an item: sums of both warpgroups and the output. Warpgroup 1, which waits for the next
// item's first scores anyway, also writes log-sum-exp and maximum, whose code and arguments come
// while half of the output is on its way. kSwept: rows come in the order of sweep.cuh.
template <bool kSwept, class Family>
__device__ __forceinline__ void epilogue(Smem<Family>& smem, const Args& args, const Work& work,
                                         int warpgroup, float (&o)[128], TwoRows& rows,
                                         const float (&sink)[2]) {
  const int warp = (threadIdx.x / 32) & 3;
  const int lane = threadIdx.x & 31;
  const int row = warp * 16 + lane / 4;
  const float unit = logit_unit(args);
#pragma unroll
  for (int i = 0; i < 2; i++)
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      rows.row_sum[i] += __shfl_xor_sync(~0u, rows.row_sum[i], d);
      rows.row_max[i] = fmaxf(rows.row_max[i], __shfl_xor_sync(~0u, rows.row_max[i], d));
    }
  if ((lane & 3) == 0)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      smem.row_sum[work.parity][warpgroup][row + 8 * i] = rows.row_sum[i];
      smem.max_logit[work.parity][warpgroup][row + 8 * i] = rows.row_max[i] * unit;
    }
  bar<kSumsWritten, kConsumers>();
  float factor[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const float row_sum =
        smem.row_sum[work.parity][0][row + 8 * i] + smem.row_sum[work.parity][1][row + 8 * i];
    const float weight = ex2(sink[i] * kLog2e - rows.reference[i]);
    factor[i] = row_sum == 0 ? 0.f : __fdividef(1.f, row_sum + weight);
  }
  const auto halfway = [&] {
    if (warpgroup == 1) write_sums(smem, args, work, rows);
    __syncwarp();
  };
  const uint32_t place = warpgroup * 4 + warp;
  if constexpr (!TilesOf<Family>::kTail) {
    // This warp's rows of a tile of P. Their last readers are products that both warpgroups have
    // waited for, their next writer is this warp with the next item's P.
    write_pieces<64>(args, work, o, factor, s32(smem.p) + place * 2048, halfway);
  } else if constexpr (!kSwept) {
    // A tile of P already waits for the next item's rows, but nothing is sorted.
    static_assert(sizeof smem.sorted >= 8 * 1024 && offsetof(Smem<Family>, sorted) % 16 == 0);
    write_pieces<32>(args, work, o, factor, s32(smem.sorted) + place * 1024, halfway);
  } else {
    write_sectors(args, work, o, factor, halfway);
  }
}

}  // namespace winnow::internal::attend::wide_sm90
