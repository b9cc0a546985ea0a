// Decode on Hopper: P of half of the heads, and O^T += V^T P^T for half of the columns.
//
// The two weigh warpgroups run the same code, in named steps: for each block load_scores(),
// move_reference() if a logit has outgrown the reference, make_weights(), multiply_values(); at the
// end of a token epilogue(). They meet at kWeighing once a block, when P is there, and more often
// where the reference moves or maxima are tracked.
//
// Work is divided in two ways. For P each warpgroup has half of the heads, and a warp 16 rows, one
// stage (quad: a pair of heads, row: a row and the one 8 further). For O^T each warpgroup has 256
// columns, a warp four tiles of 16 of them (sixteen_of()), and all heads on the N side.
//
// Both warpgroups share one code, because two of them did not fit the instruction cache (V4 waited
// 15 % of its time). So with V4's fp8 rows the code treats the last tile of either warpgroup as one
// that may be RoPE's. It is in the second one, where score has left fp16 (rope.cuh).
#pragma once

#include "attend/decode_sm90/codes.cuh"
#include "attend/decode_sm90/epilogue.cuh"
#include "attend/decode_sm90/exact.cuh"

namespace winnow::internal::attend::decode_sm90 {

// What weigh knows of a block. P is an array beside it, not a member: the compiler takes a struct
// with an array apart only after it has unrolled all loops, and makes different code.
struct BlockRows {
  // 2^lambda and lambda of rows r and r + 8 of this warp's stage.
  float2 lambda0, lambda1;
  // Whether the reference has to move before P is made.
  bool outgrown;
  // Whether the block has odd scales: P is then bf16 and has no 2^lambda (exact.cuh).
  bool exact;
  // Whether the stages are kept when the block is done, because the output leaves through them
  // (OutputStaging).
  bool kept;
};

template <class Row, int kHeads, Way kWay>
struct Weigh : Epilogue<Row, kHeads, kWay> {
  using Base = Epilogue<Row, kHeads, kWay>;
  using Base::args, Base::lane, Base::o, Base::progress, Base::quad, Base::row, Base::row_sum,
      Base::smem, Base::span, Base::thread, Base::warp, Base::warpgroup;
  using Base::first_eight, Base::has_eight, Base::kept_head, Base::kOwnEights, Base::wait_for_peer;
  using typename Base::Config, typename Base::KeptHead, typename Base::Staging;
  // P of a block, or log2 P. For each eight of this warpgroup's heads a thread has four values:
  // heads 2 quad and 2 quad + 1 of row r, then of row r + 8.
  using Weights = float[4 * kOwnEights];

  // The reference for a largest log2 P, before kTop is taken off. Of fp8 rows it is an integer. The
  // weights that two ranks or two splits of a token give a key then differ by a power of two, and
  // fp16 rounds both by the same part of themselves, so that the ranks' outputs merge to one rank's
  // bits. Of bf16 rows it is the value itself, since bf16 would round a dominant weight by up to
  // 2^-8.
  static __device__ __forceinline__ float reference_at(float largest) {
    return Row::kFp8 ? ceilf(largest) : largest;
  }
  __device__ __forceinline__ Weigh(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                   int warpgroup, int thread, WeighProgress<kHeads>& progress,
                                   float (&row_sum)[2 * kOwnEights])
      : Base(smem, args, span, warpgroup, thread, progress, row_sum) {}

  // Whether a tile may be RoPE's, which has no scales.
  static __device__ constexpr bool rope_tile(int tile) { return Config::kRopeInV && tile == 3; }

  // Waits until all products of this warpgroup are done.
  __device__ void drain() {
    wg_wait<0>();
#pragma unroll
    for (int tile = 0; tile < 4; tile++) hold(o[tile]);
  }

  // Reads log2 P of block i, and what is known of its rows. It does so before it waits for the last
  // block's products, which saves 150 cycles.
  __device__ __forceinline__ void load_scores(int i, int kv_stage, Weights& log2_p,
                                              BlockRows& block) {
    mb_wait(&smem.log2_p_full, i & 1);
#pragma unroll
    for (int j = 0; j < kOwnEights; j++) {
      const float4 v = smem.log2_p[has_eight(j) ? first_eight + j : 0][thread];
      log2_p[4 * j] = v.x;
      log2_p[4 * j + 1] = v.y;
      log2_p[4 * j + 2] = v.z;
      log2_p[4 * j + 3] = v.w;
    }
    const int stage =
        kv_stage + warp < Config::kStages ? kv_stage + warp : kv_stage + warp - Config::kStages;
    block.lambda0 = smem.row_lambda[stage][row];
    block.lambda1 = smem.row_lambda[stage][row + 8];
    block.outgrown = smem.outgrown[i & 1];
    block.exact = false;
    if constexpr (Config::kHasExactPath) block.exact = smem.odd_scales[kv_stage] & kOddBlock;
    drain();
    // This warpgroup's products have read the last block's P.
    if (i >= 1 && lane == 0) mb_arrive(&smem.p_empty);
  }

  // The maximum of log2 P plus a shift of each row, over the block, for each of this warpgroup's
  // heads. Returns that of the head whose statistics this thread keeps.
  __device__ float column_max(const Weights& p, float shift0, float shift1) {
#pragma unroll
    for (int j = 0; j < kOwnEights; j++) {
      float even = fmaxf(p[4 * j] + shift0, p[4 * j + 2] + shift1);
      float odd = fmaxf(p[4 * j + 1] + shift0, p[4 * j + 3] + shift1);
#pragma unroll
      for (int d = 4; d < 32; d *= 2) {
        even = fmaxf(even, __shfl_xor_sync(~0u, even, d));
        odd = fmaxf(odd, __shfl_xor_sync(~0u, odd, d));
      }
      if (row == 0 && has_eight(j))
        *reinterpret_cast<float2*>(&smem.warp_part[warp][8 * (first_eight + j) + 2 * quad]) =
            make_float2(even, odd);
    }
    wait_for_peer();
    const KeptHead kept = kept_head();
    const int h = kept.exists ? kept.head : 0;
    return fmaxf(fmaxf(smem.warp_part[0][h], smem.warp_part[1][h]),
                 fmaxf(smem.warp_part[2][h], smem.warp_part[3][h]));
  }

  // The largest logit of each head, only if the caller requests it. A row without a token gives NaN
  // (-inf + inf), which fmaxf passes over.
  __device__ __forceinline__ void track_max_logit(const Weights& log2_p, const BlockRows& block) {
    const float most = column_max(log2_p, -block.lambda0.y, -block.lambda1.y);
    const auto [head, exists] = kept_head();
    if (exists) smem.max_logit[head] = fmaxf(smem.max_logit[head], most + smem.reference[head]);
    // All have read warp_part before the next maxima are written there.
    wait_for_peer();
  }

  // Rare: moves the reference of every head up to the block's maximum (kTop in layout.cuh), and
  // rescales log2 P, row sums and output.
  __device__ __forceinline__ void move_reference(int i, Weights& log2_p) {
    const float most = column_max(log2_p, 0.f, 0.f);
    const auto [head, exists] = kept_head();
    if (exists) {
      // No logit above -inf has been seen yet. (During the blocks row_sum only says whether one
      // was.)
      const bool first = smem.row_sum[head] == 0;
      const float old = smem.reference[head];
      const float top = reference_at(most) - kTop<Row>;
      const float up = first ? (most > -INFINITY ? top : 0.f) : fmaxf(0.f, top);
      const float moved = fminf(old + up, FLT_MAX);
      smem.reference[head] = moved;
      smem.factor[head] = moved - old;
      smem.rescale[head] = first ? 0.f : ex2(old - moved);
      // A head that still has no reference sets one in the next block.
      if (most > -INFINITY) smem.row_sum[head] = 1;
      else if (first) smem.outgrown[~i & 1] = 1;
    }
    if (warpgroup == 0 && thread == 0) smem.outgrown[i & 1] = 0;
    wait_for_peer();
    const auto own_pair = [&](const float* of, int j) {
      return *reinterpret_cast<const float2*>(
          &of[8 * (has_eight(j) ? first_eight + j : 0) + 2 * quad]);
    };
#pragma unroll
    for (int j = 0; j < kOwnEights; j++) {
      const float2 up = own_pair(smem.factor, j);
      const float2 rescale = own_pair(smem.rescale, j);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& v = log2_p[4 * j + e];
        v = v == INFINITY ? kTop<Row> : v - (e & 1 ? up.y : up.x);
      }
      row_sum[2 * j] *= rescale.x;
      row_sum[2 * j + 1] *= rescale.y;
    }
    if (i > 0) {
#pragma unroll
      for (int j = 0; j < kHeads / 8; j++) {
        const float2 rescale = *reinterpret_cast<const float2*>(&smem.rescale[8 * j + 2 * quad]);
#pragma unroll
        for (int tile = 0; tile < 4; tile++) {
          o[tile][4 * j] *= rescale.x;
          o[tile][4 * j + 1] *= rescale.y;
          o[tile][4 * j + 2] *= rescale.x;
          o[tile][4 * j + 3] *= rescale.y;
        }
      }
    }
  }

  // Makes P and the row sums of this warpgroup's heads, and stores P for both warpgroups.
  __device__ __forceinline__ void make_weights(int i, int kv_stage, const BlockRows& block,
                                               Weights& p) {
    // Let score store the next log2 P: this one has been read, and the reference is the new one.
    if (!(Staging::kOverLog2P && block.kept)) mb_arrive(&smem.log2_p_empty[i & 1]);
    // 2^-lambda, and 0 for a row without a token: P contains 2^lambda, which the row sum must not.
    const auto inverse = [](float2 lambda) {
      return lambda.y > -INFINITY ? __uint_as_float((254u << 23) - __float_as_uint(lambda.x)) : 0.f;
    };
    float inverse0 = inverse(block.lambda0);
    float inverse1 = inverse(block.lambda1);
    const bool exact = block.exact;
    // Odd scales: take 2^lambda out of P.
    if (exact) {
      const float shift0 = inverse0 > 0 ? block.lambda0.y : 0;
      const float shift1 = inverse1 > 0 ? block.lambda1.y : 0;
#pragma unroll
      for (int c = 0; c < 4 * kOwnEights; c++) p[c] -= c & 2 ? shift1 : shift0;
      inverse0 = block.lambda0.y > -INFINITY;
      inverse1 = block.lambda1.y > -INFINITY;
    }
#pragma unroll
    for (int j = 0; j < kOwnEights; j++) {
#pragma unroll
      for (int e = 0; e < 4; e++) p[4 * j + e] = ex2(p[4 * j + e]);
      row_sum[2 * j] = fmaf(p[4 * j], inverse0, fmaf(p[4 * j + 2], inverse1, row_sum[2 * j]));
      row_sum[2 * j + 1] =
          fmaf(p[4 * j + 1], inverse0, fmaf(p[4 * j + 3], inverse1, row_sum[2 * j + 1]));
    }
    if constexpr (Row::kCodes) {
      const int stage =
          kv_stage + warp < Config::kStages ? kv_stage + warp : kv_stage + warp - Config::kStages;
      float4 scale[2];
#pragma unroll
      for (int k = 0; k < 2; k++)
        scale[k] = *reinterpret_cast<const float4*>(
            smem.ring[stage] + (row + 8 * k) * Config::kPitch + Row::kScaleOffset);
      wait_for_last_weights(i);
      store_code_weights<Row, kHeads>(smem, first_eight, scale, inverse0, inverse1, p);
    } else {
      store_weights(i, exact, p);
    }
  }

  // Waits until both warpgroups' products have read the last block's P.
  __device__ __forceinline__ void wait_for_last_weights(int i) {
    if (i >= 1) mb_wait(&smem.p_empty, (i - 1) & 1);
  }

  // Stores P^T as [row][head], fp16 for fp8 rows, bf16 for bf16 rows and blocks with odd scales.
  __device__ __forceinline__ void store_weights(int i, bool exact, const Weights& p) {
    const int here = thread_here();
    const int p_row = (here >> 1 & 48) + (here & 15);
    // Stores eights j - 1 and j of this warpgroup's heads, or j alone, as P^T.
    const auto store = [&](auto bf16, int j, uint32_t to) {
      constexpr bool kBf16 = decltype(bf16)::value;
      const bool two = j & 1 && has_eight(j);
      const uint32_t address =
          to + p_row * 128 +
          (((first_eight + (j & 1 ? j - 1 + (lane >> 4) : j)) ^ (p_row & 7)) << 4);
      const uint32_t x0 = pack<kBf16>(p[4 * j], p[4 * j + 1]);
      const uint32_t x1 = pack<kBf16>(p[4 * j + 2], p[4 * j + 3]);
      if (j & 1) {
        const uint32_t before0 = pack<kBf16>(p[4 * j - 4], p[4 * j - 3]);
        const uint32_t before1 = pack<kBf16>(p[4 * j - 2], p[4 * j - 1]);
        if (two) stsm4(address, before0, before1, x0, x1);
        else stsm2(address, before0, before1);
      } else if (has_eight(j)) {
        stsm2(address, x0, x1);
      }
    };
    wait_for_last_weights(i);
#pragma unroll
    for (int j = 0; j < kOwnEights; j++)
      if ((j & 1) || j == kOwnEights - 1) {
        if (!exact) store(std::bool_constant<!Row::kFp8>{}, j, s32(smem.p));
        if (exact) store(std::true_type{}, j, s32(smem.p));
      }
  }

  // O^T += V^T P^T of a block with e4m3 products, from V's codes as they are stored: a step is 32
  // rows, half a step two tiles of 16 columns a warp, which share a scale. Else as
  // multiply_values().
  __device__ __forceinline__ void multiply_codes_of_values(int i, int block_end,
                                                           const BlockRows& block,
                                                           uint32_t fp8_offset, int& kv_stage) {
    uint32_t raw[2][4];
    uint32_t a[2][2][4];
    const auto next = [](int stage) { return stage + 1 == Config::kStages ? 0 : stage + 1; };
    const auto load = [&](int stage, int half) {
      ldsm_t(raw[0], s32(smem.ring[stage]) + fp8_offset + 128 * half);
      ldsm_t(raw[1], s32(smem.ring[next(stage)]) + fp8_offset + 128 * half);
    };
    const auto make = [&](int half) {
#pragma unroll
      for (int k = 0; k < 2; k++) {
        uint32_t(&f)[4] = a[half][k];
        interleave(raw[0][2 * k], raw[0][2 * k + 1], f[0], f[1]);
        interleave(raw[1][2 * k], raw[1][2 * k + 1], f[2], f[3]);
      }
    };
    load(kv_stage, 0);
    make(0);
    load(kv_stage, 1);
    // P of both warpgroups is there, and visible to the products.
    fence_async();
    wait_for_peer();
    // The last block: statistics leave while it is multiplied.
    if (kWay == Way::kExchange && i + 1 == block_end) this->send_statistics_early();
    uint32_t p_desc = desc(s32(smem.p) + warpgroup * (2 * kCodePBytes), 16);
    const auto multiply = [&](int half) {
      const uint32_t p_here = fresh(p_desc + (half * kCodePBytes >> 4));
      wg_fence();
#pragma unroll
      for (int k = 0; k < 2; k++)
        wgmma_e4m3(o[2 * half + k], a[half][k], whole_desc<kCodePDescHigh>(p_here), 1);
      wg_commit();
    };
#pragma unroll
    for (int step = 0; step < 2; step++, p_desc += 32 >> 4) {
      const int first = kv_stage;
      const int second = next(first);
      multiply(0);
      wg_wait<1>();
      make(1);
      kv_stage = next(second);
      if (step == 0) load(kv_stage, 0);
      multiply(1);
      // Free both stages, but not before these products are issued, see multiply_values().
      __syncwarp();
      if (lane == 0 && !block.kept) {
        mb_arrive(&smem.stage_empty[first]);
        mb_arrive(&smem.stage_empty[second]);
      }
      if (step == 0) {
        wg_wait<1>();
        make(0);
        load(kv_stage, 1);
      }
    }
  }

  // O^T += V^T P^T of a block, and gives its stages back. Half a step is 16 rows and two tiles of
  // 16 columns a warp; the rows of the next one are read while this one multiplies. The products of
  // the last half step are under way when it returns.
  __device__ __forceinline__ void multiply_values(int i, int block_end, const BlockRows& block,
                                                  uint32_t fp8_offset, uint32_t bf16_offset,
                                                  int& kv_stage) {
    constexpr int kScales = Row::kFp8 && Row::kTile == 64 ? 2 : 1;
    uint32_t raw[4];
    uint32_t scale[kScales][2];
    uint32_t a[2][2][4];
    // Reads both fp8 tiles of half a step, and their scales.
    const auto load = [&](int half) {
      if constexpr (Row::kFp8) {
        ldsm_t(raw,
               s32(smem.ring[kv_stage]) + fp8_offset + sixteen_of<Row, kHeads>(0, 2 * half) * 16);
        // A warp's columns have one scale.
        if (kScales == 1 && half == 1) return;
#pragma unroll
        for (int k = 0; k < kScales; k++) {
          // RoPE's factor is the last one.
          const int tile = kScales == 2 ? 4 * warpgroup + 2 * half + k : 2 * warpgroup + warp / 2;
          const uint2 two = *reinterpret_cast<const uint2*>(&smem.scales[kv_stage][tile][4 * quad]);
          scale[k][0] = two.x;
          scale[k][1] = two.y;
        }
      }
    };
    // Makes the fragments of half a step.
    const auto dequantize = [&](int half) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        // The tile that may be RoPE's comes first: ldmatrix reads it while the other one is made.
        const int k = rope_tile(2 * half + 1) ? 1 - n : n;
        const int tile = 2 * half + k;
        uint32_t(&f)[4] = a[half][k];
        const uint32_t lo = scale[k % kScales][0];
        const uint32_t hi = scale[k % kScales][1];
        if (!Row::kFp8) {
          ldsm_t(f, s32(smem.ring[kv_stage]) + bf16_offset + tile * 32);
        } else {
          e4m3x4(__byte_perm(raw[k * 2], 0, 0x3120), f[0], f[1]);
          e4m3x4(__byte_perm(raw[k * 2 + 1], 0, 0x3120), f[2], f[3]);
#pragma unroll
          for (int e = 0; e < 4; e++) f[e] = mul_h2(f[e], e < 2 ? lo : hi);
          // By a predicate: with a branch between products, ptxas would wait for each.
          if (rope_tile(tile))
            ldsm_t_if(warpgroup, f,
                      s32(smem.ring[kv_stage]) + bf16_offset - 512 + Row::kRopeOffset);
        }
      }
    };
    load(0);
    dequantize(0);
    load(1);
    // P of both warpgroups is there, and visible to the products.
    fence_async();
    wait_for_peer();
    // The last block: statistics leave while it is multiplied.
    if (kWay == Way::kExchange && i + 1 == block_end) this->send_statistics_early();
    uint32_t p_desc = desc(s32(smem.p), 8192);
    if constexpr (Config::kHasExactPath)
      if (block.exact) {
        exact_products<Row, kHeads>(smem, kv_stage, warpgroup, p_desc, o);
        kv_stage += 4;
        if (kv_stage >= Config::kStages) kv_stage -= Config::kStages;
        return;
      }
    const auto multiply = [&](int half) {
      const uint32_t p_here = fresh(p_desc);
      wg_fence();
#pragma unroll
      for (int k = 0; k < 2; k++)
        wgmma_rs<kHeads, !Row::kFp8, 1>(o[2 * half + k], a[half][k], p_here, 1);
      wg_commit();
    };
#pragma unroll
    for (int step = 0; step < 4; step++, p_desc += 2048 >> 4) {
      const int this_stage = kv_stage;
      multiply(0);
      wg_wait<1>();
      dequantize(1);
      if (++kv_stage == Config::kStages) kv_stage = 0;
      if (step < 3) load(0);
      multiply(1);
      // Free the stage, but not before these products are issued. Only they wait for the ldmatrix
      // that reads it: an earlier arrival would overtake the read, and the next rows would arrive
      // where these are still being read.
      __syncwarp();
      if (lane == 0 && !block.kept) mb_arrive(&smem.stage_empty[this_stage]);
      if (step < 3) {
        wg_wait<1>();
        dequantize(0);
        load(1);
      }
    }
  }
};

// Weighs a token's blocks, from progress.block on, then ends the token; `progress` moves past them.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void weigh(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                      int warpgroup, WeighProgress<kHeads>& progress) {
  using Weigher = Weigh<Row, kHeads, kWay>;
  using Config = ConfigOf<Row, kHeads>;
  using Staging = typename Weigher::Staging;
  float row_sum[2 * Weigher::kOwnEights];
  const int thread = thread_here() & 127;
  const int lane = thread & 31;
  const int warp = thread / 32;
  Weigher weigher(smem, args, span, warpgroup, thread, progress, row_sum);
#pragma unroll
  for (int c = 0; c < 2 * Weigher::kOwnEights; c++) row_sum[c] = 0;
  // Where this lane's rows of V begin in a stage, for fp8 and for bf16 columns. Lanes 0-7, 8-15,
  // 16-23 and 24-31 give the rows of the four 8x8 tiles of ldmatrix.
  const uint32_t fp8_offset = ((lane & 7) + 8 * ((lane >> 3) & 1)) * Config::kPitch +
                              warpgroup * 256 + sixteen_of<Row, kHeads>(warp, lane >> 4) * 16;
  const uint32_t bf16_offset = ((lane & 7) + 8 * (lane >> 4)) * Config::kPitch +
                               ((lane >> 3) & 1) * 16 + warp * (Row::kFp8 ? 32 : 128) +
                               warpgroup * 512;
  // Here and in the epilogue args.exchange is set, and tested all the same: else ptxas has products
  // wait for each other (C7515).
  if (kWay == Way::kExchange && args.exchange) weigher.mark_own_statistics();
  int kv_stage = progress.kv_stage;
  const int block_end = progress.block + span.blocks;
  if (Staging::kUsed && progress.block > 0 && span.blocks > 0) {
    // Give back the stages through which the last token's output left. The wait is for the first
    // block, which this warpgroup needs anyway: the copies have most likely read the stages by
    // then.
    mb_wait(&smem.log2_p_full, progress.block & 1);
    give_back(smem, kv_stage);
  }
#pragma unroll 1
  for (int i = progress.block; i < block_end; i++) {
    typename Weigher::Weights p;
    BlockRows block;
    weigher.load_scores(i, kv_stage, p, block);
    if (args.max_logit) weigher.track_max_logit(p, block);
    if (block.outgrown) weigher.move_reference(i, p);
    block.kept = Staging::kUsed && i + 1 == block_end;
    weigher.make_weights(i, kv_stage, block, p);
    if constexpr (Row::kCodes)
      weigher.multiply_codes_of_values(i, block_end, block, fp8_offset, kv_stage);
    else weigher.multiply_values(i, block_end, block, fp8_offset, bf16_offset, kv_stage);
  }
  weigher.drain();
  weigher.epilogue(kv_stage, block_end);
}

}  // namespace winnow::internal::attend::decode_sm90
