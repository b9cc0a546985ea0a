// Decode on Hopper: the warps that copy rows into the ring, find the rows of later blocks, and
// describe the blocks that have arrived.
#pragma once

#include <climits>

#include "attend/decode_sm90/describe.cuh"

namespace winnow::internal::attend::decode_sm90 {

// 2^(byte - 127); 255 is NaN.
__device__ __forceinline__ float ue8m0(uint32_t byte) {
  return __uint_as_float(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 1u << 22);
}

// An fp8 record among bf16 rows (two lists of different formats): the warp makes the bf16 row.
template <class Row>
__device__ __forceinline__ void convert_row(const std::byte* row, const std::byte* side,
                                            uint8_t* to) {
  using Quantized = typename Row::Quantized;
  const int lane = thread_here() & 31;
  // A lane has 16 values.
  if (lane < Quantized::kNope / 16) {
    const int tile = lane * 16 / Quantized::kTile;
    float scale;
    if constexpr (std::is_same_v<typename Quantized::Scale, float>) {
      scale = __ldg(reinterpret_cast<const float*>(side) + tile);
    } else {
      const uint32_t byte = __ldg(reinterpret_cast<const uint8_t*>(side) + tile);
      scale = ue8m0(byte);
    }
    const uint4 codes = __ldg(reinterpret_cast<const uint4*>(row) + lane);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      uint32_t lo, hi;
      e4m3x4(i == 0 ? codes.x : i == 1 ? codes.y : i == 2 ? codes.z : codes.w, lo, hi);
      *reinterpret_cast<uint2*>(to + lane * 32 + i * 8) =
          make_uint2(exact_pair(lo, scale, scale), exact_pair(hi, scale, scale));
    }
  }
  if (lane < Quantized::kRope / 8)
    reinterpret_cast<uint4*>(to + Quantized::kNope * 2)[lane] =
        __ldg(reinterpret_cast<const uint4*>(row + Quantized::rope(0, 1)) + lane);
}

// The index at a position of the token's lists, -1 from the split's end on; and its list.
__device__ __forceinline__ int index_at(const Args& args, const Span& span, int position,
                                        int& list) {
  list = position >= span.first_list_end;
  if (position >= span.end) return -1;
  const ListView& view = args.lists[list];
  return __ldg(view.indices + (int64_t)span.token * view.index_stride +
               (position - (list ? span.first_list_end : 0)));
}
// Which of the copying warps this is.
template <class Crew>
__device__ __forceinline__ int copy_warp() {
  return thread_here() / 32 & (Crew::kCopyWarps - 1);
}
// The index of a copying warp's lane in the first two blocks. Of eight warps each has a stage; of
// four each has one stage of either block, a row a lane.
template <class Config, class Crew>
__device__ __forceinline__ int first_index(const Args& args, const Span& span, int& list) {
  const int thread = thread_here();
  const int warp = copy_warp<Crew>();
  const int stage = Crew::kCopyWarps == 8 ? warp : (thread / 16 & 1) * 4 + warp;
  return index_at(args, span, span.begin + stage * Config::kRows + (thread & 15), list);
}

struct ListedPlace : Place {
  int list;
};

// resolve() for slots, the common case. Without a branch, and with constants chosen instead of
// arguments at an index, since whatever this takes is taken from the copies.
__device__ __forceinline__ Place place_of_slot(const Args& args, int list, int index) {
  const ListView& first = args.lists[0];
  const ListView& second = args.lists[1];
  PageRows page_rows;
  page_rows.rows = list ? second.page.rows : first.page.rows;
  page_rows.shift = list ? second.page.shift : first.page.shift;
  page_rows.factor = list ? second.page.factor : first.page.factor;
  const int page = page_rows.of(index);
  const bool valid = index >= 0 && page < (list ? second.pages : first.pages);
  return {valid ? page : -1, index - page * page_rows.rows};
}
// resolve() of two entries, logical ids or slots beside them. Their pages are requested together:
// one after the other they cost a call of 64 tokens 6 %.
struct TwoPlaces {
  Place of[2];
};
__device__ __forceinline__ TwoPlaces places_by_table(const Args& args, int token, int list0,
                                                     int index0, int list1, int index1) {
  const int list[2] = {list0, list1};
  const int index[2] = {index0, index1};
  const int request = __ldg(args.requests + token * args.request_stride);
  int logical_page[2];
  int page[2];
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const ListView& view = args.lists[list[k]];
    logical_page[k] = page[k] = view.page.of(index[k]);
    if (view.block_table) {
      const bool valid = index[k] >= 0 && logical_page[k] < view.table_width && request >= 0 &&
                         request < view.table_rows;
      page[k] =
          valid ? __ldg(view.block_table + request * view.table_stride + logical_page[k]) : -1;
    }
  }
  TwoPlaces places;
#pragma unroll
  for (int k = 0; k < 2; k++) {
    const ListView& view = args.lists[list[k]];
    const bool valid = index[k] >= 0 && page[k] >= 0 && page[k] < view.pages;
    places.of[k] = {valid ? page[k] : -1, index[k] - logical_page[k] * view.page.rows};
  }
  return places;
}

// Rows of zeros, from which entries without a token are copied: nothing stale is multiplied, and a
// hole takes no longer than a row. There is one for two or three multiprocessors, which would wait
// for each other at the lines of a single one.
constexpr int kZeroRows = 64;
static __device__ uint4 zero_rows[kZeroRows][V32Bf16::kRowBytes / 16];
__device__ __forceinline__ const std::byte* zero_row() {
  unsigned multiprocessor;
  asm("mov.u32 %0,%%smid;" : "=r"(multiprocessor));
  return reinterpret_cast<const std::byte*>(zero_rows[multiprocessor % kZeroRows]);
}

// Fills a stage, once it is free, where some rows are missing (`source`, a lane's row, is null),
// lie far from each other, or are not `copied`: those are bf16 rows of fp8 records, whose scales
// are at `side`. It is called, so that its code lies after the kernel's, and only it waits for the
// address of the zeros, which is in no cache.
template <class Row, int kHeads>
__device__ __noinline__ void fill_apart(Smem<Row, kHeads>& smem, int kv_stage, int phase,
                                        const std::byte* source, const std::byte* side,
                                        uint32_t copied) {
  const auto of_lane = [](const std::byte* x, int lane) {
    return __shfl_sync(~0u, reinterpret_cast<uint64_t>(x), lane);
  };
  if (!source) source = zero_row();
  mb_wait(&smem.stage_empty[kv_stage], phase);
#pragma unroll 4
  for (int r = 0; r < 16; r++) {
    uint8_t* const to = smem.ring[kv_stage] + r * ConfigOf<Row, kHeads>::kPitch;
    const uint64_t row = of_lane(source, r);
    if (Row::kFp8 || copied >> r & 1) {
      bulk_copy_one(s32(to), row, Row::kRowBytes, s32(&smem.stage_full[kv_stage]));
    } else if constexpr (!Row::kFp8) {
      convert_row<Row>(reinterpret_cast<const std::byte*>(row),
                       reinterpret_cast<const std::byte*>(of_lane(side, r)), to);
    }
  }
  if constexpr (!Row::kFp8) fence_async();
}

// Fills a stage once it is free, a row for each of the warp's lower lanes.
template <class Row, int kHeads>
__device__ __forceinline__ void fill(Smem<Row, kHeads>& smem, const Args& args, int kv_stage,
                                     int phase, ListedPlace place) {
  using Config = ConfigOf<Row, kHeads>;
  const int lane = thread_here() & 31;
  // The record's address, null where there is none; `side`: its scales', where the copy needs them.
  const std::byte* source = nullptr;
  const std::byte* side = nullptr;
  if (place.page >= 0) {
    const ListView& view = args.lists[place.list];
    const std::byte* page = view.data + place.page * view.page_stride;
    source = page + Row::Stored::row(place.offset, view.page);
    if constexpr (Row::kSideBytes > 0) side = page + Row::Stored::scales(place.offset, view.page);
    if constexpr (!Row::kFp8) {
      using Quantized = typename Row::Quantized;
      if (view.format == Quantized::kFormat) {
        side = page + Quantized::scales(place.offset, view.page);
        source = page + Quantized::row(place.offset, view.page);
      }
    }
  }
  const uint32_t valid = __ballot_sync(~0u, source != nullptr);
  const uint32_t copied = Row::kFp8 ? 0xffff : __ballot_sync(~0u, !side) & 0xffff;
  const uint32_t full = s32(&smem.stage_full[kv_stage]);
  // Each row's address is made uniform: a lane that copies with its own takes 80 cycles a row. Rows
  // are passed as their distance from the first one, in one word, where that is near enough.
  const uint64_t base = __shfl_sync(~0u, reinterpret_cast<uint64_t>(source), 0);
  const int64_t distance = static_cast<int64_t>(reinterpret_cast<uint64_t>(source) - base) >> 4;
  const int near_distance = static_cast<int>(distance);
  const uint32_t near = __ballot_sync(~0u, source && distance == near_distance);
  if ((near & copied) == 0xffff) {
    // In uniform registers before the stage is free.
    uint64_t from[16];
    from[0] = base;
#pragma unroll
    for (int r = 1; r < 16; r++) from[r] = base + (int64_t)__shfl_sync(~0u, near_distance, r) * 16;
    mb_wait(&smem.stage_empty[kv_stage], phase);
#pragma unroll
    for (int r = 0; r < 16; r++)
      bulk_copy_one(s32(smem.ring[kv_stage]) + r * Config::kPitch, from[r], Row::kRowBytes, full);
  } else {
    fill_apart<Row, kHeads>(smem, kv_stage, phase, source, side, copied);
  }
  if constexpr (Row::kSideBytes > 0) {
    if (source)
      asm volatile("cp.async.ca.shared.global [%0],[%1],%2;" ::"r"(s32(smem.side[kv_stage]) +
                                                                   (lane & 15) * Row::kSideBytes),
                   "l"(side), "n"(Row::kSideBytes)
                   : "memory");
    copies_arrive(&smem.stage_full[kv_stage]);
  }
  // Each lane arrives after what it wrote itself; lane 0 arrives for all where nobody wrote.
  const bool converted = !Row::kFp8 && copied != 0xffff;
  if (lane == 0) {
    smem.valid[kv_stage] = valid;
    mb_expect(&smem.stage_full[kv_stage], __popc(copied) * Row::kRowBytes);
    if (Row::kSideBytes == 0 && !converted) mb_arrive(&smem.stage_full[kv_stage], 31);
  } else if (converted) {
    mb_arrive(&smem.stage_full[kv_stage]);
  }
}

// Blocks of a CTA's first token whose rows the copying warps look up themselves.
__device__ __forceinline__ int own_blocks(const Span& span) { return min(span.blocks, 2); }
// The first block whose rows are looked up for the copying warps.
template <class Crew>
__device__ __forceinline__ int first_told(int own) {
  return Crew::kCopyWarps == 8 ? own : min(own, 1);
}
// In place of a page: this block comes after the CTA's last one.
constexpr int kNoMore = -2;

// Copies rows, a stage of 16 rows a warp. Four warps share the first block, whose rows they look up
// themselves together with those of the second (`index`, `list`: a lane's). The fourth warp passes
// its part of the second to the others, then describes the first as soon as it has arrived, for
// which all wait. From then on the others copy what it has looked up, with kMany from token to
// token. Where the copying warps looked up all rows, that took half of their time, and with 128
// heads everything waited for them. Eight warps share the first two blocks; then six proceed.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void copy(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                     int index, int list) {
  using Config = ConfigOf<Row, kHeads>;
  using Crew = CrewOf<Row, kHeads, kWay>;
  constexpr bool kMany = walks(kWay);
  constexpr bool kEight = Crew::kCopyWarps == 8;
  const int lane = thread_here() & 31;
  // From lane 0, so that the compiler knows it and what follows from it as uniform.
  const int warp = __shfl_sync(~0u, copy_warp<Crew>(), 0);
  const bool copier = warp < Crew::kCopiers;
  const int own = kMany ? __shfl_sync(~0u, own_blocks(span), 0) : 2;
  const Place first = Crew::kBlockTables && by_table(args.lists)
                          ? places_by_table(args, span.token, list, index, 0, -1).of[0]
                          : place_of_slot(args, list, index);
  // The stage of the ring and its phase; the block, and which quarter of it; the entry of
  // smem.place with its phase, (block - first_told(own)) mod kAhead.
  int kv_stage = warp;
  int phase = 1;
  int quarter = warp & 3;
  int block = warp / 4;
  int place_phase = 0;
  int place_entry = max(block - first_told<Crew>(own), 0);
  if (kMany && !copier && block >= own) return;
  if (!kEight && warp == 3 && own == 2) {
    Place second = first;
    if (kMany) second.offset |= list << 31;
    if (lane >= 16) smem.place[0][3 * Config::kRows + (lane & 15)] = second;
    mb_arrive(&smem.places_found[0]);
  }
#pragma unroll 1
  while (kMany || block < span.blocks) {
    const int row = quarter * Config::kRows + (lane & 15);
    const int source_lane = (kEight ? 0 : block * 16) + (lane & 15);
    Place place;
    const bool own_lookup = block < own && (kEight || block + quarter < 4);
    if (own_lookup) {
      place = {__shfl_sync(~0u, first.page, source_lane),
               __shfl_sync(~0u, first.offset, source_lane)};
    } else {
      mb_wait(&smem.places_found[place_entry], place_phase);
      place = smem.place[place_entry][row];
      if (kMany && __all_sync(~0u, place.page == kNoMore)) return;
    }
    if (lane >= 16) place.page = -1;
    int of_list = span.begin + block * Config::kBlock + row >= span.first_list_end;
    // The list of later tokens' rows is in the sign of the offset.
    if (kMany && !own_lookup) {
      of_list = place.offset < 0;
      place.offset &= INT_MAX;
    }
    fill<Row, kHeads>(smem, args, kv_stage, phase, {place, of_list});
    if (!copier) break;
    // Of four warps: the same stage of the second block, then every third stage. Of eight: every
    // sixth stage from the third block on.
    const bool leap = kEight ? own == 2 && own_lookup : own_lookup && block == 0;
    const int step = leap ? Crew::kCopyWarps : Crew::kCopiers;
    kv_stage += step;
    if (kv_stage >= Config::kStages) {
      kv_stage -= Config::kStages;
      phase ^= 1;
    }
    quarter += step;
#pragma unroll
    for (int k = 0; k < Crew::kCopyWarps / 4; k++)
      if (quarter >= 4) {
        quarter -= 4;
        block++;
        if (block > first_told<Crew>(own) && ++place_entry == Config::kAhead) {
          place_entry = 0;
          place_phase ^= 1;
        }
      }
  }
}

// What the last copying warp does then: it describes block after block as they arrive, and finds
// the rows of the kAhead-th block after each, with kMany of later tokens too. Of eight warps the
// last but one finds them, kAhead blocks at once.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void look_ahead(Smem<Row, kHeads>& smem, const Args& args, Span span) {
  using Config = ConfigOf<Row, kHeads>;
  using Crew = CrewOf<Row, kHeads, kWay>;
  constexpr bool kMany = walks(kWay);
  constexpr bool kApart = Crew::kCopyWarps == 8;
  const int lane = thread_here() & 31;
  const int own = kMany ? own_blocks(span) : 2;
  // Blocks of the tokens before span's, and with it.
  int blocks_before = 0;
  int block_end = span.blocks;
  // A lane's k-th position in a block. Of several tokens a CTA has all rows, unless it helps.
  const auto position = [&](int block, int k) {
    return (kWay == Way::kMany ? 0 : span.begin) + (block - blocks_before) * Config::kBlock + lane +
           32 * k;
  };
  // The token's lists, both by position.
  const int32_t* first;
  const int32_t* second;
  const auto point_at_token = [&] {
    first = args.lists[0].indices + span.token * args.lists[0].index_stride;
    second =
        args.lists[1].indices + (span.token * args.lists[1].index_stride - span.first_list_end);
  };
  point_at_token();
  // A lane's two indices of a block.
  const auto load_indices = [&](int block) {
    if constexpr (kMany) {
      while (block >= block_end && next_token<kWay>(smem, args, span)) {
        blocks_before = block_end;
        block_end += span.blocks;
        point_at_token();
      }
    }
    const auto load = [&](int at) {
      const bool in_first = !Crew::kTwoLists || at < span.first_list_end;
      return at < span.end ? __ldg((in_first ? first : second) + at) : -1;
    };
    return make_int2(load(position(block, 0)), load(position(block, 1)));
  };
  // Writes where the rows of a block are, over the places of the block that has arrived. All
  // copying warps get the mark of the end, although one in six skips a block.
  const auto tell = [&](int block, int2 indices) {
    if (kMany ? block > block_end + kApart : block >= block_end) return;
    const unsigned entry = (block - first_told<Crew>(own)) % unsigned{Config::kAhead};
    const auto list = [&](int k) {
      return static_cast<int>(Crew::kTwoLists && position(block, k) >= span.first_list_end);
    };
    const bool slots = !Crew::kBlockTables || !by_table(args.lists);
    TwoPlaces found;
    if (!slots) found = places_by_table(args, span.token, list(0), indices.x, list(1), indices.y);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      Place place = slots ? place_of_slot(args, list(k), k ? indices.y : indices.x) : found.of[k];
      if constexpr (kMany) {
        if (block >= block_end) place.page = kNoMore;
        place.offset |= list(k) << 31;
      }
      smem.place[entry][lane + 32 * k] = place;
    }
    mb_arrive(&smem.places_found[entry]);
  };
  int kv_stage = lane >> 3;
  int phase = 0;
  const auto describe_next = [&](int i) {
    mb_wait_all(&smem.stage_full[kv_stage], phase);
    describe<Row, kHeads>(smem, kv_stage);
    mb_arrive(&smem.block_ready[i % kReady]);
    kv_stage += 4;
    if (kv_stage >= Config::kStages) {
      kv_stage -= Config::kStages;
      phase ^= 1;
    }
  };
  if (kApart && copy_warp<Crew>() == Crew::kCopyWarps - 1) {
#pragma unroll 1
    for (int i = 0;; i++) {
      if constexpr (kMany)
        while (i >= block_end && next_token<kWay>(smem, args, span)) block_end += span.blocks;
      if (i >= block_end) return;
      describe_next(i);
    }
  }
  int next_block = own;
  int2 next = load_indices(own);
  if constexpr (kApart) {
#pragma unroll 1
    for (; next_block <= block_end + 1; next = load_indices(++next_block)) {
      // The places of this block are free where its rows are there.
      const int arrived = next_block - Config::kAhead;
      if (arrived >= own) mb_wait(&smem.block_ready[arrived % kReady], (arrived / kReady) & 1);
      tell(next_block, next);
    }
  } else {
#pragma unroll 1
    for (int i = own > 0 ? 0 : -1; i < block_end; i++) {
      if (i >= 0) describe_next(i);
#pragma unroll 1
      do {
        tell(next_block, next);
        next = load_indices(++next_block);
      } while (next_block <= i + Config::kAhead);
    }
  }
}

}  // namespace winnow::internal::attend::decode_sm90
