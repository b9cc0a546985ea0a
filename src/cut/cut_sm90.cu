// cut on Hopper: keys of the values travel (0: no candidate), and a block finds a row's cut.
//
// Who does what: the row's block copies its keys to shared memory. 512 spread keys give even bins
// of the range in which the cut lies (topk_shared.cuh); the few entries of its bin are ranked by
// key and position. Rows that do not fit the scheme (ties, infinities, a bin of more than kRanked)
// go by digits of the keys, then of the positions, three rounds each. Positions are read where keys
// are equal to the cut's bin alone. Then the block keeps this rank's entries of the row, where the
// cuts of all rows are found here, and sorts the row's positions, where they are asked for.
//
// Budget for 8 x 2,048 candidates, in cycles: 64 KB of keys 2,500; bins 1,500; search 600; entries
// and ranks 800; keeping 2,048 entries 600, which are loaded meanwhile. Measured it takes twice
// that (docs/parallel-cuda.md); keys in registers and unrolled loops took the same time.
#include <bit>

#include "core/arithmetic.h"
#include "cuda/launch.h"
#include "cuda/topk_shared.cuh"
#include "cut/kernel.h"

namespace winnow::internal::cut {

namespace {

using namespace cuda::ranking;

constexpr int64_t kMostStaged = 24576;   // keys of a row in shared memory
constexpr int64_t kMostSorted = 16384;   // positions of a row
constexpr int64_t kMostWidth = 1 << 20;  // so that candidates of a row are counted in 31 bits
constexpr size_t kMostDynamicBytes = 200 << 10;
constexpr int kPackThreads = 256;

// A candidate as one number: larger is better, 0 for none.
__device__ __forceinline__ uint64_t order_on_device(uint32_t key, int32_t position) {
  return key ? uint64_t{key} << 32 | static_cast<uint32_t>(INT32_MAX - position) : 0;
}

struct FindMemory {
  SharedRowMemory even;
  uint32_t bins[kBins];
  uint32_t valid;  // candidates of the row
  uint32_t given;  // positions collected
  uint64_t cut;
};

// The candidates of a row: column c is entry c % width of rank c / width.
struct Candidates {
  const uint32_t* keys;
  int64_t block_stride;
  uint32_t width, total;

  __device__ __forceinline__ Candidates(const Params& p, int64_t row)
      : keys(reinterpret_cast<const uint32_t*>(p.candidates) + row * 2 * p.width),
        block_stride(p.rows * 2 * p.width),
        width(static_cast<uint32_t>(p.width)),
        total(width * static_cast<uint32_t>(p.blocks)) {}
  __device__ __forceinline__ const uint32_t* at(uint32_t column) const {
    const uint32_t block = column / width;
    return keys + block * block_stride + (column - block * width);
  }
  __device__ __forceinline__ int32_t position(uint32_t column) const {
    return static_cast<int32_t>(at(column)[width]);
  }
};

// The keys of a row, in shared memory (kStaged) or where they are.
template <bool kStaged>
struct Keys {
  const Candidates& row;
  const uint32_t* staged;  // a multiple of four, 0 behind the last

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

// Asks for the keys of a row; they are there after copies_done().
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
    sm.even.rank[atomicAdd(&sm.even.entries, 1u)] = {
        key, static_cast<uint32_t>(keys.row.position(column))};
  });
  __syncthreads();
  // A warp ranks an entry. The same candidate may be there again: ids are data.
  const uint32_t wanted = width - found.above, lane = threadIdx.x % 32;
  for (uint32_t e = threadIdx.x / 32; e < found.count; e += kWarps) {
    const uint2 mine = sm.even.rank[e];
    uint32_t better = 0, same = 0;
    for (uint32_t i = 0; i < found.count; i += 32) {
      const uint2 other = sm.even.rank[min(i + lane, kRanked - 1)];
      const bool there = i + lane < found.count;
      const bool wins = other.x > mine.x || (other.x == mine.x && other.y < mine.y);
      better += __popc(__ballot_sync(~0u, there && wins));
      same += __popc(__ballot_sync(~0u, there && other.x == mine.x && other.y == mine.y));
    }
    if (lane == 0 && better < wanted && wanted <= better + same)
      sm.cut = order_on_device(mine.x, static_cast<int32_t>(mine.y));
  }
  __syncthreads();
  return sm.cut;
}

// The cut by digits of the keys, then of the positions from above. It is the least number that no
// candidate behind the K-th reaches.
template <bool kStaged>
__device__ __forceinline__ uint64_t cut_by_digits(const Keys<kStaged>& keys, FindMemory& sm) {
  uint32_t prefix = 0, mask = 0, tie = 0, wanted = keys.row.width;
  bool tied = false, whole = false;  // whether positions decide; whether the rest is wanted whole
  const uint32_t bins = cuda::fresh(cuda::s32(sm.bins));
#pragma unroll 1
  for (int round = 0; round < 6 && !whole; ++round) {
    if (round == 3) {
      tie = prefix;
      tied = true;
      prefix = mask = 0;
    }
    const int shift = shift_of(round % 3);
    const uint32_t digits = digits_of(round % 3);
    clear(sm.bins, sizeof sm.bins);
    __syncthreads();
    keys.each([&](uint32_t column, uint32_t key) {
      if (key == 0 || (tied && key != tie)) return;
      const uint32_t word =
          tied ? static_cast<uint32_t>(INT32_MAX - keys.row.position(column)) : key;
      if ((word & mask) == prefix) count(bins, word >> shift & digits);
    });
    __syncthreads();
    const Found found = find(sm.bins, wanted, sm.even.scan);
    prefix |= found.digit << shift;
    mask |= digits << shift;
    wanted -= found.above;
    whole = found.count == wanted;
  }
  return tied ? uint64_t{tie} << 32 | prefix : uint64_t{prefix} << 32;
}

// Entries of this rank's row that a thread looks at together.
struct KeptTile {
  static constexpr uint32_t kEach = 4, kSize = kEach * kThreads;
  uint32_t key[kEach];
  int32_t position[kEach], id[kEach];

  // Asks for those of the tile that begins at column `first`.
  __device__ __forceinline__ void load(const Keeping& k, int64_t row, uint32_t first) {
    const auto width = static_cast<uint32_t>(k.own.width);
    const uint32_t* const keys =
        reinterpret_cast<const uint32_t*>(k.own.packed) + row * 2 * k.own.width;
    const int32_t* const ids = k.own.ids + row * k.own.id_stride;
#pragma unroll
    for (uint32_t i = 0; i < kEach; ++i) {
      const uint32_t column = first + threadIdx.x * kEach + i;
      const bool there = column < width;
      key[i] = there ? keys[column] : 0;
      position[i] = there ? static_cast<int32_t>(keys[width + column]) : 0;
      id[i] = there ? ids[column] : 0;
    }
  }
};

// This rank's entries of a row that are not behind the cut, in their order; `tile` has the first
// ones. All of a tile are read before one is written at or before them, so `kept` may be the ids.
__device__ __forceinline__ void keep_row(const Keeping& k, int64_t row, uint64_t cut, KeptTile tile,
                                         Scan& scan) {
  const auto width = static_cast<uint32_t>(k.own.width);
  int32_t* const kept = k.kept ? k.kept + row * k.kept_stride : nullptr;
  uint32_t before = 0;
#pragma unroll 1
  for (uint32_t first = 0; first < width; first += KeptTile::kSize) {
    if (first > 0) {
      __syncthreads();
      tile.load(k, row, first);
    }
    uint32_t n = 0;
    bool stays[KeptTile::kEach];
#pragma unroll
    for (uint32_t i = 0; i < KeptTile::kEach; ++i) {
      const uint64_t order = order_on_device(tile.key[i], tile.position[i]);
      stays[i] = order != 0 && order >= cut;
      n += stays[i];
    }
    uint32_t place = before + scan_block(n, scan);
    before += __reduce_add_sync(~0u, threadIdx.x % 32 < kWarps ? scan.warps[threadIdx.x % 32] : 0);
#pragma unroll
    for (uint32_t i = 0; i < KeptTile::kEach; ++i)
      if (kept && stays[i]) kept[place++] = tile.id[i];
  }
  for (uint32_t column = before + threadIdx.x; kept && column < width; column += kThreads)
    kept[column] = -1;
  if (k.counts && threadIdx.x == 0) k.counts[row * k.count_stride] = static_cast<int32_t>(before);
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
      const uint64_t order = order_on_device(key, position);
      if (equal ? order != cut : order <= cut) return;
      if (const uint32_t place = atomicAdd(&sm.given, 1u); place < width) sorted[place] = position;
    });
    __syncthreads();
  }
  const uint32_t given = min(sm.given, width);
  sort(sorted, room);
  for (uint32_t i = threadIdx.x; i < width; i += kThreads) out[i] = i < given ? sorted[i] : -1;
}

struct FindArgs {
  Params p;
  Keeping keeping;
  bool keeps;
  uint32_t staged;  // keys in dynamic shared memory, a multiple of four; 0: none
  uint32_t sorted;  // places behind them, a power of two; 0: no positions
};

template <bool kStaged>
__global__ void __launch_bounds__(kThreads, 1) find_cuts(const __grid_constant__ FindArgs args) {
  __shared__ FindMemory sm;
  extern __shared__ __align__(16) uint32_t dynamic[];
  const int64_t row = blockIdx.x;
  const Candidates candidates(args.p, row);
  const Keys<kStaged> keys{candidates, dynamic};
  int32_t* const sorted = reinterpret_cast<int32_t*>(dynamic + args.staged);
  if constexpr (kStaged) stage_keys(candidates, dynamic);
  const uint32_t place = threadIdx.x << 16 | (threadIdx.x * 40503 & 0xffff);
  const auto column = static_cast<uint32_t>(uint64_t{place} * candidates.total >> (16 + 9));
  const uint32_t sample = *candidates.at(column);
  KeptTile tile;
  if (args.keeps) tile.load(args.keeping, row, 0);
  clear(&sm.even, sizeof sm.even);
  if (threadIdx.x == 0) {
    sm.valid = sm.given = 0;
    sm.cut = 0;
  }
  if constexpr (kStaged) copies_done();
  __syncthreads();

  // Keys of 0 and of NaN are NaN again.
  uint64_t cut = cut_by_bins(keys, value_of(sample), sm);
  if (cut == 0 && sm.valid > candidates.width) cut = cut_by_digits(keys, sm);
  if (threadIdx.x == 0) args.p.cuts[row] = static_cast<int64_t>(cut);
  if (args.keeps) keep_row(args.keeping, row, cut, tile, sm.even.scan);
  if (args.sorted) {
    __syncthreads();
    give_positions(keys, cut, args.p.positions + row * args.p.position_stride, sorted, args.sorted,
                   sm);
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
void launch(const FindArgs& args) noexcept {
  const auto bytes = (args.staged + args.sorted) * sizeof(uint32_t);
  cuda::keep_error(cuda::allow_shared(find_cuts<kStaged>, kMostDynamicBytes));
  find_cuts<kStaged>
      <<<static_cast<unsigned>(args.p.rows), kThreads, bytes, cuda::stream_of(args.p.device)>>>(
          args);
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
  FindArgs args{p, {}, p.keeping != nullptr, 0, 0};
  if (p.keeping) args.keeping = *p.keeping;
  if (p.positions) args.sorted = std::bit_ceil(static_cast<uint32_t>(p.width));
  const int64_t total = round_up<int64_t>(p.width * p.blocks, 4);
  if (total > kMostStaged) return launch<false>(args);
  args.staged = static_cast<uint32_t>(total);
  launch<true>(args);
}

}  // namespace winnow::internal::cut
