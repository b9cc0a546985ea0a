// Decode on Hopper: the copying warps. Copiers fill the ring, a stage of 16 rows at a time: fill().
// Each looks up the rows of its first stages itself; where later rows are, another warp finds and
// publishes in Smem::place: look_ahead(). That warp, or of eight one more, describes the blocks
// that have arrived (describe.cuh).
//
// Which stages a warp w takes, counted from the CTA's first row on, when the first token has two
// blocks or more. (A stage lies at its number modulo kStages in the ring.)
//
//                 looked up by itself   found by another warp
//   four warps    w (block 0)
//     copiers     w + 4 (block 1)       w + 7, w + 10, ...: every third from stage 7 on
//     warp 3                            (it passes on what it has looked up of stage 7)
//   eight warps   w (blocks 0 and 1)
//     copiers                           w + 8, w + 14, ...: every sixth from stage 8 on
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

// The index at a position of the token's lists, -1 from the split's end on. Sets `list` to the list
// that the position is in.
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
// The index that a lane of a copying warp looks up in the first two blocks. Of eight warps each has
// one stage; of four each has one stage of either block, a row a lane.
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

// resolve() (attend/kernel.h) for slots, the common case. It has no branch and selects between the
// arguments of the lists instead of indexing them, because the copies wait for it.
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
// resolve() of two entries, each with a logical id or a slot, where one list of the call has
// logical ids. Their pages are requested together: one after the other they cost a call of 64
// tokens 6 %.
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

// Rows of zeros, from which entries without a token are copied: nothing stale is multiplied, and
// such an entry takes no longer than a row. Two or three multiprocessors share one; at a single one
// all would wait for each other.
constexpr int kZeroRows = 64;
static __device__ uint4 zero_rows[kZeroRows][V32Bf16::kRowBytes / 16];
__device__ __forceinline__ const std::byte* zero_row() {
  unsigned multiprocessor;
  asm("mov.u32 %0,%%smid;" : "=r"(multiprocessor));
  return reinterpret_cast<const std::byte*>(zero_rows[multiprocessor % kZeroRows]);
}

// The uncommon case of fill(): some rows have no token (`source`, a lane's row, is null), lie far
// from each other, or are not `copied` but converted, bf16 rows of fp8 records whose scales are at
// `side`. It is called, so that its code lies after the kernel's, and only it waits for the address
// of the zeros, which is in no cache.
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

// Fills a stage once it is free: `place` is the row of each of the warp's lower 16 lanes.
template <class Row, int kHeads>
__device__ __forceinline__ void fill(Smem<Row, kHeads>& smem, const Args& args, int kv_stage,
                                     int phase, ListedPlace place) {
  using Config = ConfigOf<Row, kHeads>;
  const int lane = thread_here() & 31;
  // The address of the lane's record, null where there is none; and of its scales, where these lie
  // apart or the row has to be converted.
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
  // A bit for each row: it has a token; it is copied, not converted.
  const uint32_t valid = __ballot_sync(~0u, source != nullptr);
  const uint32_t copied = Row::kFp8 ? 0xffff : __ballot_sync(~0u, !side) & 0xffff;
  const uint32_t full = s32(&smem.stage_full[kv_stage]);
  // Copies are issued with addresses in uniform registers: with each lane's own address a copy
  // takes 80 cycles. A lane's address is handed to the warp as the distance from the first row,
  // which takes one shuffle where it fits 32 bits, in units of 16 bytes.
  const uint64_t base = __shfl_sync(~0u, reinterpret_cast<uint64_t>(source), 0);
  const int64_t distance = static_cast<int64_t>(reinterpret_cast<uint64_t>(source) - base) >> 4;
  const int near_distance = static_cast<int>(distance);
  const uint32_t near = __ballot_sync(~0u, source && distance == near_distance);
  if ((near & copied) == 0xffff) {
    // The shuffles come before the wait: the stage is then filled as soon as it is free.
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
  // The arrivals that stage_full counts (BarrierTable). Where scales lie apart, each lane has just
  // arrived by copies_arrive(). Else each arrives after the stores that converted rows, or lane 0
  // arrives for all.
  const bool converted = !Row::kFp8 && copied != 0xffff;
  if (lane == 0) {
    smem.valid[kv_stage] = valid;
    mb_expect(&smem.stage_full[kv_stage], __popc(copied) * Row::kRowBytes);
    if (Row::kSideBytes == 0 && !converted) mb_arrive(&smem.stage_full[kv_stage], 31);
  } else if (converted) {
    mb_arrive(&smem.stage_full[kv_stage]);
  }
}

// Blocks of a CTA's first token whose rows the copying warps look up themselves: `own` below.
__device__ __forceinline__ int own_blocks(const Span& span) { return min(span.blocks, 2); }
// The first block with an entry in Smem::place. With four warps it is block 1, whose last stage is
// looked up by warp 3 and copied by another.
template <class Crew>
__device__ __forceinline__ int first_found(int own) {
  return Crew::kCopyWarps == 8 ? own : min(own, 1);
}
// Stands for a page: this block comes after the CTA's last one.
constexpr int kEndOfBlocks = -2;

// Copies rows, a stage of 16 rows a warp at a time, in the order of the table above; `index` and
// `list` are what each lane has looked up. A warp that is no copier returns after its first stage.
// Copiers return after the last block: of the span, or, where a CTA walks from token to token,
// where they find kEndOfBlocks.
//
// Copiers do not look up later rows themselves: that took half of their time, and with 128 heads
// everything waited for them.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void copy(Smem<Row, kHeads>& smem, const Args& args, const Span& span,
                                     int index, int list) {
  using Config = ConfigOf<Row, kHeads>;
  using Crew = CrewOf<Row, kHeads, kWay>;
  constexpr bool kWalks = walks(kWay);
  constexpr bool kEight = Crew::kCopyWarps == 8;
  const int lane = thread_here() & 31;
  // From lane 0, so that the compiler knows it and what follows from it as uniform.
  const int warp = __shfl_sync(~0u, copy_warp<Crew>(), 0);
  const bool copier = warp < Crew::kCopiers;
  const int own = kWalks ? __shfl_sync(~0u, own_blocks(span), 0) : 2;
  const Place first = Crew::kBlockTables && by_table(args.lists)
                          ? places_by_table(args, span.token, list, index, 0, -1).of[0]
                          : place_of_slot(args, list, index);
  // The stage of the ring, and the phase of stage_empty to wait for: the first wait passes.
  int kv_stage = warp;
  int phase = 1;
  // The block, and which quarter of it.
  int quarter = warp & 3;
  int block = warp / 4;
  // The entry of smem.place, (block - first_found(own)) mod kAhead, and the phase of its barrier.
  int place_phase = 0;
  int place_entry = max(block - first_found<Crew>(own), 0);
  if (kWalks && !copier && block >= own) return;
  // Pass on what this warp has looked up of stage 7.
  if (!kEight && warp == 3 && own == 2) {
    Place second = first;
    if (kWalks) second.offset |= list << 31;
    if (lane >= 16) smem.place[0][3 * Config::kRows + (lane & 15)] = second;
    mb_arrive(&smem.places_found[0]);
  }
#pragma unroll 1
  while (kWalks || block < span.blocks) {
    // Find the lane's row: its own look-up, or what another warp has published.
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
      if (kWalks && __all_sync(~0u, place.page == kEndOfBlocks)) return;
    }
    if (lane >= 16) place.page = -1;
    int of_list = span.begin + block * Config::kBlock + row >= span.first_list_end;
    // Of published rows the list is in the sign of the offset: the span may be an earlier token's.
    if (kWalks && !own_lookup) {
      of_list = place.offset < 0;
      place.offset &= INT_MAX;
    }
    fill<Row, kHeads>(smem, args, kv_stage, phase, {place, of_list});
    if (!copier) break;
    // Step to this warp's next stage, by the table above.
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
        if (block > first_found<Crew>(own) && ++place_entry == Config::kAhead) {
          place_entry = 0;
          place_phase ^= 1;
        }
      }
  }
}

// What the warps that are no copiers do after their first stages. Of four warps the last one
// describes block i as soon as it has arrived, for which score waits, then publishes the places of
// block i + kAhead, also of later tokens. Of eight warps the last one describes, and the last but
// one publishes places, kAhead blocks ahead of the rows that have arrived.
template <class Row, int kHeads, Way kWay>
__device__ __forceinline__ void look_ahead(Smem<Row, kHeads>& smem, const Args& args, Span span) {
  using Config = ConfigOf<Row, kHeads>;
  using Crew = CrewOf<Row, kHeads, kWay>;
  constexpr bool kWalks = walks(kWay);
  constexpr bool kApart = Crew::kCopyWarps == 8;
  const int lane = thread_here() & 31;
  const int own = kWalks ? own_blocks(span) : 2;
  // Blocks of the CTA's tokens before span.token, and with that one.
  int blocks_before = 0;
  int block_end = span.blocks;
  // A lane's k-th position in a block. (With Way::kMany span.begin is always 0.)
  const auto position = [&](int block, int k) {
    return (kWay == Way::kMany ? 0 : span.begin) + (block - blocks_before) * Config::kBlock + lane +
           32 * k;
  };
  // The token's lists; both are indexed by position.
  const int32_t* first;
  const int32_t* second;
  const auto point_at_token = [&] {
    first = args.lists[0].indices + span.token * args.lists[0].index_stride;
    second =
        args.lists[1].indices + (span.token * args.lists[1].index_stride - span.first_list_end);
  };
  point_at_token();
  // Loads a lane's two indices of a block, -1 after the last one. Moves on to the block's token.
  const auto load_indices = [&](int block) {
    if constexpr (kWalks) {
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
  // Publishes where the rows of a block are, in the entry of the block kAhead before, whose rows
  // have arrived. After a CTA's last block comes one marked kEndOfBlocks; of six copiers, each of
  // which may skip a block, two of these.
  const auto publish_places = [&](int block, int2 indices) {
    if (kWalks ? block > block_end + kApart : block >= block_end) return;
    const unsigned entry = (block - first_found<Crew>(own)) % unsigned{Config::kAhead};
    const auto list = [&](int k) {
      return static_cast<int>(Crew::kTwoLists && position(block, k) >= span.first_list_end);
    };
    const bool slots = !Crew::kBlockTables || !by_table(args.lists);
    TwoPlaces found;
    if (!slots) found = places_by_table(args, span.token, list(0), indices.x, list(1), indices.y);
#pragma unroll
    for (int k = 0; k < 2; k++) {
      Place place = slots ? place_of_slot(args, list(k), k ? indices.y : indices.x) : found.of[k];
      if constexpr (kWalks) {
        if (block >= block_end) place.page = kEndOfBlocks;
        place.offset |= list(k) << 31;
      }
      smem.place[entry][lane + 32 * k] = place;
    }
    mb_arrive(&smem.places_found[entry]);
  };
  // Waits for block i and describes it. A quarter of the warp has one stage of it.
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
  // The last of eight warps: describe all blocks of all tokens.
  if (kApart && copy_warp<Crew>() == Crew::kCopyWarps - 1) {
#pragma unroll 1
    for (int i = 0;; i++) {
      if constexpr (kWalks)
        while (i >= block_end && next_token<kWay>(smem, args, span)) block_end += span.blocks;
      if (i >= block_end) return;
      describe_next(i);
    }
  }
  int next_block = own;
  int2 next = load_indices(own);
  if constexpr (kApart) {
    // The last but one of eight: publish the places of all blocks, and the marks of the end.
#pragma unroll 1
    for (; next_block <= block_end + 1; next = load_indices(++next_block)) {
      // An entry is free when the rows of its last block have arrived: the copiers have read it.
      const int arrived = next_block - Config::kAhead;
      if (arrived >= own) mb_wait(&smem.block_ready[arrived % kReady], (arrived / kReady) & 1);
      publish_places(next_block, next);
    }
  } else {
    // The last of four: describe a block, then publish the places of all blocks up to kAhead after
    // it. If the first token has no block of its own to describe, places come first.
#pragma unroll 1
    for (int i = own > 0 ? 0 : -1; i < block_end; i++) {
      if (i >= 0) describe_next(i);
#pragma unroll 1
      do {
        publish_places(next_block, next);
        next = load_indices(++next_block);
      } while (next_block <= i + Config::kAhead);
    }
  }
}

}  // namespace winnow::internal::attend::decode_sm90
