// cut on Hopper: keys of the values travel (0: no candidate). What a plan sends is cut by clusters
// (cluster_sm90.cu); here a block finds the cut of any other row: of a width that is no multiple of
// four, of more keys than the registers of a cluster hold, or with the row's positions as output.
//
// Who does what: the row's block copies its keys to shared memory. 512 spread keys give even bins
// of the range in which the cut lies (topk_shared.cuh); the few entries of its bin are ranked. Rows
// that do not fit the scheme (ties, infinities, a bin of more than kRanked) go by digits of the
// keys, then of the positions, three rounds each. Then the block keeps this rank's entries of the
// row, where the cuts of all rows are found here, and sorts the row's positions, where they are
// requested.
//
// Budget for 8 x 2,048 candidates, in cycles: 64 KB of keys 2,500; bins 1,500; search 600; entries
// and ranks 800; keeping 2,048 entries 600, which are loaded meanwhile.
#include <bit>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "cut/row_sm90.cuh"

namespace winnow::internal::cut {

namespace {

constexpr int64_t kMostStaged = 24576;   // keys of a row in shared memory
constexpr int64_t kMostSorted = 16384;   // positions of a row
constexpr int64_t kMostWidth = 1 << 20;  // so that candidates of a row are counted in 31 bits
constexpr size_t kMostDynamicBytes = 200 << 10;
constexpr int kPackThreads = 256;

// The keys of a row, in shared memory (kStaged) or where they are.
template <bool kStaged>
struct Keys {
  const Candidates& row;
  const uint32_t* staged;  // a multiple of four, 0 after the last

  // Calls visit(column, key) for this thread's keys, 0 among them.
  template <class Visit>
  __device__ __forceinline__ void each(Visit&& visit) const {
    if constexpr (kStaged) {
#pragma unroll 1
      for (uint32_t column = threadIdx.x * 4; column < row.total; column += 4 * kThreads) {
        const uint4 four = *reinterpret_cast<const uint4*>(staged + column);
        visit(column, four.x);
        visit(column + 1, four.y);
        visit(column + 2, four.z);
        visit(column + 3, four.w);
      }
    } else {
#pragma unroll 1
      for (uint32_t column = threadIdx.x; column < row.total; column += kThreads)
        visit(column, *row.at(column));
    }
  }
};

// Requests the keys of a row; they are there after copies_done().
template <int kBytes>
__device__ __forceinline__ void copy_to_shared(uint32_t to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0],[%1],4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void stage_keys(const Candidates& row, uint32_t* staged) {
  const uint32_t to = cuda::s32(staged);
  if (row.width % 4 == 0) {
#pragma unroll 1
    for (uint32_t column = threadIdx.x * 4; column < row.total; column += 4 * kThreads)
      copy_to_shared<16>(to + column * 4, row.at(column));
  } else {
#pragma unroll 1
    for (uint32_t column = threadIdx.x; column < row.total; column += kThreads)
      copy_to_shared<4>(to + column * 4, row.at(column));
    const uint32_t behind = row.total + threadIdx.x;
    if (behind < round_up(row.total, 4u)) staged[behind] = 0;
  }
}

// The cut by even bins; 0 if the row does not fit them. Counts the candidates in sm.valid.
template <bool kStaged>
__device__ __forceinline__ uint64_t cut_by_bins(const Keys<kStaged>& keys, float sample,
                                                FindMemory& sm) {
  const uint32_t width = keys.row.width;
  const EvenBins even = bins_of(sample, keys.row.total, width, sm.even);
  const uint32_t bins = bins_at(sm.even);
  uint32_t valid = 0;
  keys.each([&](uint32_t, uint32_t key) {
    valid += key != 0;
    const float position = even.position(value_of(key));  // of 0 and of NaN: below the bins
    if (position >= EvenBins::kZero) count(bins, __float_as_uint(position));
  });
  valid = __reduce_add_sync(~0u, valid);
  if (threadIdx.x % 32 == 0) atomicAdd(&sm.valid, valid);
  __syncthreads();
  const uint32_t bin = kEven - 1 - threadIdx.x;
  const uint32_t n = sm.even.own[bin];
  const uint32_t above = scan_block(n, sm.even.scan);
  if (above < width && width <= above + n) sm.even.found = {bin, above, n};
  __syncthreads();
  const Found found = sm.even.found;
  if (!even.good() || found.count == 0 || found.count > kRanked || sm.valid <= width) return 0;

  const float middle = EvenBins::kZero + static_cast<float>(found.digit);
  keys.each([&](uint32_t column, uint32_t key) {
    if (key == 0 || even.position(value_of(key)) != middle) return;
    sm.even.rank[atomicAdd(&sm.even.entries, 1u)] = {key, column};
  });
  __syncthreads();
  return rank_candidates(keys.row, found.count, width - found.above, sm);
}

// Ascending order of 2^n numbers by a bitonic network.
__device__ __forceinline__ void sort(int32_t* numbers, uint32_t size) {
  for (uint32_t span = 2; span <= size; span *= 2)
    for (uint32_t step = span / 2; step > 0; step /= 2) {
      for (uint32_t i = threadIdx.x; i < size / 2; i += kThreads) {
        const uint32_t low = i / step * 2 * step + i % step, high = low + step;
        const int32_t a = numbers[low], b = numbers[high];
        if ((a > b) == ((low & span) == 0)) {
          numbers[low] = b;
          numbers[high] = a;
        }
      }
      __syncthreads();
    }
}

// The row's whole top-k, ascending. Equal candidates fill what the better ones leave.
template <bool kStaged>
__device__ __forceinline__ void give_positions(const Keys<kStaged>& keys, uint64_t cut,
                                               int32_t* out, int32_t* sorted, uint32_t room,
                                               FindMemory& sm) {
  const uint32_t width = keys.row.width;
  for (uint32_t i = threadIdx.x; i < room; i += kThreads) sorted[i] = INT32_MAX;
  __syncthreads();
#pragma unroll 1
  for (int equal = 0; equal < 2; ++equal) {
    keys.each([&](uint32_t column, uint32_t key) {
      if (key == 0 || key < static_cast<uint32_t>(cut >> 32)) return;
      const int32_t position = keys.row.position(column);
      const uint64_t order = cut_at(key, low_of(position));
      if (equal ? order != cut : order <= cut) return;
      if (const uint32_t place = atomicAdd(&sm.given, 1u); place < width) sorted[place] = position;
    });
    __syncthreads();
  }
  const uint32_t given = min(sm.given, width);
  sort(sorted, room);
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) out[i] = i < given ? sorted[i] : -1;
}

struct BlockArgs {
  FindArgs find;
  uint32_t staged;  // keys in dynamic shared memory, a multiple of four; 0: none
  uint32_t sorted;  // places after them, a power of two; 0: no positions
};

template <bool kStaged>
__global__ void __launch_bounds__(kThreads, 1) find_cuts(const __grid_constant__ BlockArgs args) {
  __shared__ FindMemory sm;
  extern __shared__ __align__(16) uint32_t dynamic[];
  const int64_t row = blockIdx.x;
  const auto& [p, keeping, keeps] = args.find;
  const Candidates candidates(p, row);
  const Keys<kStaged> keys{candidates, dynamic};
  int32_t* const sorted = reinterpret_cast<int32_t*>(dynamic + args.staged);
  if constexpr (kStaged) stage_keys(candidates, dynamic);
  const uint32_t place = threadIdx.x << 16 | (threadIdx.x * 40503 & 0xffff);
  const auto column = static_cast<uint32_t>(uint64_t{place} * candidates.total >> (16 + 9));
  const uint32_t sample = *candidates.at(column);
  KeptTile tile;
  if (keeps) tile.load(keeping, row, 0);
  clear(&sm.even, sizeof sm.even);
  if (threadIdx.x == 0) {
    sm.valid = sm.given = 0;
    sm.cut = 0;
  }
  if constexpr (kStaged) copies_done();
  __syncthreads();

  // Keys of 0 and of NaN are NaN again.
  uint64_t cut = cut_by_bins(keys, value_of(sample), sm);
  if (cut == 0 && sm.valid > candidates.width) cut = cut_by_digits(candidates, keys, sm);
  if (threadIdx.x == 0) p.cuts[row] = static_cast<int64_t>(cut);
  if (keeps) keep_row(keeping, row, cut, tile, sm.even.scan);
  if (args.sorted) {
    __syncthreads();
    give_positions(keys, cut, p.positions + row * p.position_stride, sorted, args.sorted, sm);
  }
}

__global__ void __launch_bounds__(kThreads) keep_rows(const __grid_constant__ Keeping k) {
  __shared__ Scan scan;
  KeptTile tile;
  tile.load(k, blockIdx.x, 0);
  keep_row(k, blockIdx.x, static_cast<uint64_t>(k.cuts[blockIdx.x]), tile, scan);
}

// A thread for each entry; `chunks` blocks a row.
__global__ void __launch_bounds__(kPackThreads)
    pack_rows(const __grid_constant__ OwnRows own, const uint32_t chunks) {
  const int64_t row = blockIdx.x / chunks;
  const int64_t column = int64_t{blockIdx.x % chunks} * kPackThreads + threadIdx.x;
  if (column >= own.width) return;
  uint32_t* const to = reinterpret_cast<uint32_t*>(own.packed) + row * 2 * own.width + column;
  int64_t position = -1;
  uint32_t key = 0;
  if (row < own.tokens) {
    const int32_t id = own.ids[row * own.id_stride + column];
    const float value = own.values[row * own.value_stride + column];
    if (id >= 0) {
      const uint32_t each = own.shard.interleave, local = id;
      position =
          own.shard.world == 1
              ? id
              : (int64_t{local / each} * own.shard.world + own.shard.rank) * each + local % each;
    }
    if (position > INT32_MAX) position = -1;
    if (position >= 0) key = key_of(value);
  }
  to[0] = key;
  to[own.width] = static_cast<uint32_t>(static_cast<int32_t>(position));
}

template <bool kStaged>
void launch(const BlockArgs& args) noexcept {
  const auto bytes = (args.staged + args.sorted) * sizeof(uint32_t);
  cuda::keep_error(cuda::allow_shared(find_cuts<kStaged>, kMostDynamicBytes));
  find_cuts<kStaged><<<static_cast<unsigned>(args.find.p.rows), kThreads, bytes,
                       cuda::stream_of(args.find.p.device)>>>(args);
  cuda::keep_error(cudaGetLastError());
}

}  // namespace

const char* fits_sm90(const Shape& s) {
  if (s.width > kMostWidth) return "rows of more than 2^20 candidates";
  if (s.positions && s.width > kMostSorted) return "positions of more than 16,384 a row";
  return nullptr;
}

void pack_sm90(const OwnRows& own) noexcept {
  const int64_t chunks = ceil_div<int64_t>(own.width, kPackThreads);
  if (own.all_rows * chunks == 0) return;
  pack_rows<<<static_cast<unsigned>(own.all_rows * chunks), kPackThreads, 0,
              cuda::stream_of(own.device)>>>(own, static_cast<uint32_t>(chunks));
  cuda::keep_error(cudaGetLastError());
}

void keep_sm90(const Keeping& k) noexcept {
  if (k.own.tokens == 0) return;
  keep_rows<<<static_cast<unsigned>(k.own.tokens), kThreads, 0, cuda::stream_of(k.own.device)>>>(k);
  cuda::keep_error(cudaGetLastError());
}

void sm90(const Params& p) noexcept {
  if (p.rows == 0) return;
  if (p.width == 0 && p.keeping) keep_sm90(*p.keeping);
  if (p.width == 0) return;
  FindArgs find{p, {}, p.keeping != nullptr};
  if (p.keeping) find.keeping = *p.keeping;
  if (fits_cluster(p)) return find_in_clusters(find);
  BlockArgs args{find, 0, 0};
  if (p.positions) args.sorted = std::bit_ceil(static_cast<uint32_t>(p.width));
  const int64_t total = round_up<int64_t>(p.width * p.blocks, 4);
  if (total > kMostStaged) return launch<false>(args);
  args.staged = static_cast<uint32_t>(total);
  launch<true>(args);
}

}  // namespace winnow::internal::cut
