// Top-k of a row by counting digits: three rounds over every logit, by a block or a cluster. It
// serves any row; topk_shared.cuh and topk_filter.cuh are faster where a sample of the row tells
// where the K-th largest lies.
//
// Who does what: each warp owns a contiguous stretch of the row and keeps it in registers (or reads
// it again in every round where it is too long). In a round a block counts the digits of the keys
// that share the prefix found so far, adds its counts to every block of the cluster (remote
// additions: nobody reads another block's memory), and after one cluster barrier each block finds
// the digit of the K-th largest by itself. The search stops at the round whose bin is wanted whole.
// Then warps count what they give, tell the cluster, and write in ascending order.
//
// Budget for 8k logits in one block: loads 3,000 cycles, per round 1,500 of counting and 550 for
// the search, two or three rounds, 3,000 to place and write; a cluster pays 2,000 to 8,000 more a
// round for the additions.
#pragma once

#include "core/arithmetic.h"
#include "cuda/topk_parts.cuh"

namespace winnow::internal::cuda::ranking {

constexpr int kMaxBlocks = 8;  // of a cluster, portable

struct ExactMemory {
  uint32_t own[3][kBins];  // counts of this block
  Scan scan;
  uint32_t warp_above[kWarps], warp_ties[kWarps];
  uint32_t block_above[kMaxBlocks], block_ties[kMaxBlocks];
  alignas(16) uint32_t all[3][kBins];  // counts of the cluster; absent where a block is alone
};
constexpr size_t kAloneBytes = offsetof(ExactMemory, all);

__device__ __forceinline__ void add_remote(uint32_t address, uint32_t x) {
  asm volatile("red.relaxed.cluster.shared::cluster.add.u32 [%0],%1;" ::"r"(address), "r"(x)
               : "memory");
}

// kGroups: groups of four keys that a thread holds, 0 if the row is read from memory every time.
// Expects cleared memory, and the cluster's too if the block is not alone.
template <int kGroups, bool kCluster>
__device__ __forceinline__ void select_exactly(const Job& job, uint32_t width, ExactMemory& sm,
                                               unsigned rank, unsigned blocks) {
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const Row row = job.row;
  const uint32_t groups = ceil_div(ceil_div(row.last, 128), blocks * kWarps);
  const uint32_t start = (rank * kWarps + warp) * groups * 128, from = start + lane * 4;
  const bool inside = start >= row.first && start + groups * 128 <= row.last;

  uint4 held[kGroups > 0 ? kGroups : 1];
  if constexpr (kGroups > 0) {
    if (inside) {
      float4 x[kGroups];
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (g < groups) x[g] = load_inside(row, from + g * 128);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) held[g] = g < groups ? keys_of(x[g]) : uint4{};
    } else {
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        held[g] = g < groups ? keys_near_edge(row, from + g * 128) : uint4{};
    }
  }
  // Calls visit(column, four keys) for the warp's stretch, in order.
  const auto each = [&](auto&& visit) {
    if constexpr (kGroups > 0) {
#pragma unroll
      for (int g = 0; g < kGroups; ++g) visit(from + g * 128, held[g]);
    } else {
#pragma unroll 4
      for (uint32_t g = 0; g < groups; ++g) {
        const uint32_t v = from + g * 128;
        visit(v, inside ? keys_of(load_inside(row, v)) : keys_near_edge(row, v));
      }
    }
  };

  // Find the K-th largest key, digit by digit.
  uint32_t prefix = 0, mask = 0, wanted = width;
  bool whole = false;  // everything from `prefix` up is wanted
  for (int round = 0; round < 3 && !whole; ++round) {
    const int shift = shift_of(round);
    const uint32_t digits = digits_of(round);
    const uint32_t bins = fresh(s32(sm.own[round]));
    each([&](uint32_t, const uint4& k) {
      const auto add = [&](uint32_t key) {
        if (key != 0 && (key & mask) == prefix) count(bins, key >> shift & digits);
      };
      add(k.x), add(k.y), add(k.z), add(k.w);
    });
    __syncthreads();
    if constexpr (kCluster) {
#pragma unroll
      for (int i = 0; i < kBins / kThreads; ++i) {
        const int bin = i * kThreads + threadIdx.x;
        if (const uint32_t n = sm.own[round][bin])
          for (unsigned r = 0; r < blocks; ++r) add_remote(peer(s32(&sm.all[round][bin]), r), n);
      }
      cluster_sync();
    }
    const Found found = find(kCluster ? sm.all[round] : sm.own[round], wanted, sm.scan);
    prefix |= found.digit << shift;
    mask |= digits << shift;
    wanted -= found.above;
    whole = found.count == wanted;
  }
  // Given: every key from `cut` up, and the first `ties` of those that equal `tie`.
  const uint32_t cut = whole ? max(prefix, 1u) : prefix + 1, ties = whole ? 0 : wanted;
  const uint32_t tie = whole ? ~0u : prefix;  // no key is ~0

  // Count, per warp, then over warps and blocks.
  uint32_t above = 0, tied = 0;
  each([&](uint32_t, const uint4& k) {
    above += (k.x >= cut) + (k.y >= cut) + (k.z >= cut) + (k.w >= cut);
    tied += (k.x == tie) + (k.y == tie) + (k.z == tie) + (k.w == tie);
  });
  above = __reduce_add_sync(~0u, above);
  tied = __reduce_add_sync(~0u, tied);
  if (lane == 0) {
    sm.warp_above[warp] = above;
    sm.warp_ties[warp] = tied;
  }
  if constexpr (kCluster) {
    if (lane < blocks) {
      add_remote(peer(s32(&sm.block_above[rank]), lane), above);
      add_remote(peer(s32(&sm.block_ties[rank]), lane), tied);
    }
    __syncwarp();
    cluster_sync();
  } else {
    __syncthreads();
  }
  uint32_t above_before = lane < warp ? sm.warp_above[lane] : 0;
  uint32_t ties_before = lane < warp ? sm.warp_ties[lane] : 0;
  if (kCluster && lane < rank) {
    above_before += sm.block_above[lane];
    ties_before += sm.block_ties[lane];
  }
  above_before = __reduce_add_sync(~0u, above_before);
  ties_before = __reduce_add_sync(~0u, ties_before);

  // Write, in ascending order: lanes follow each other, four columns each.
  const uint32_t below = (1u << lane) - 1;
  each([&](uint32_t v, const uint4& k) {
    const uint32_t key[4] = {k.x, k.y, k.z, k.w};
    uint32_t over = above_before, equal = ties_before;
    bool given = false;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t a = __ballot_sync(~0u, key[i] >= cut);
      over += __popc(a & below);
      above_before += __popc(a);
      given |= a != 0;
    }
    if (ties > 0) {  // the same in all lanes
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t t = __ballot_sync(~0u, key[i] == tie);
        equal += __popc(t & below);
        ties_before += __popc(t);
        given |= t != 0;
      }
    }
    if (!given) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (key[i] >= cut) job.put(over++ + min(equal, ties), v + i);
      else if (key[i] == tie) {
        if (equal < ties) job.put(over + equal, v + i);
        ++equal;
      }
    }
  });
}

// As many blocks a row as the cluster has.
template <int kGroups, bool kCluster>
__global__ void __launch_bounds__(kThreads, kGroups > 8 ? 1 : 2)
    exact_kernel(const __grid_constant__ TopkParams p, unsigned blocks) {
  extern __shared__ __align__(16) unsigned char raw[];
  ExactMemory& sm = *reinterpret_cast<ExactMemory*>(raw);
  const unsigned rank = blockIdx.x % blocks;
  let_next_start();
  const Job job = job_of(p, blockIdx.x / blocks);
  if (job.row.last - job.row.first <= p.width) {  // for the whole cluster
    wait_for_previous();
    return give_all(p, job, rank, blocks);
  }
  clear(raw, kCluster ? sizeof(ExactMemory) : kAloneBytes);
  kCluster ? cluster_sync() : __syncthreads();
  wait_for_previous();
  select_exactly<kGroups, kCluster>(job, static_cast<uint32_t>(p.width), sm, rank, blocks);
}

}  // namespace winnow::internal::cuda::ranking
