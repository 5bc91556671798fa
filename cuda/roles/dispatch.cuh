// Dispatch: copies each token's rows, of one array or more, to its pool rows.
//
// reads      row_slot of the plan; x, in the backward also dy
// writes     a pool of each; with Steps::kZeroPads also the pads that products over rows read:
//            those that share 64 rows with a row
// waits on   nothing but its own copies: hence every row is written whatever blocks are resident
// signals    x_ready of the row's tile: +1 for each row, pads included
// threads    one of each of two warps; it claims kRows rows at a time, in pool order
//
// Bulk copies through a ring of pieces in shared memory keep several rows on their way. Through
// registers, 16 bytes a lane, a row took 2.3 us of a warp and the products waited for rows.
//
// Each row is copied by itself: on one GPU, rows that are copied long before they are read cost as
// much as is saved when a token is read once for all of them, as roles/dispatch_tokens.cuh does.
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/piece_ring.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "roles/pads.cuh"
#include "shared/part.h"

namespace megamoe {

template <typename Steps>
class DispatchRole {
  using Params = typename Steps::Params;

 public:
  __device__ DispatchRole(SharedMemory& shared, const Params& params, int comm_warp)
      : p_(params), ring_(shared, comm_warp, {}, {params}), zeros_(params, ring_.behind()) {}

  // Called by a whole warp; returns when all its copies are in memory and published.
  __device__ void Run() {
    if (threadIdx.x % kWarpThreads == 0) Walk();
    __syncwarp();
  }

 private:
  static constexpr int kRows = 8;  // of a claim, in one tile
  static_assert(kTileRows % kRows == 0);
  static constexpr int kNone = -1;
  // The slots of a claim's rows, first to last.
  struct Slots {
    int v[kRows];
    __device__ __forceinline__ int TakeFirst() {
      const int first = v[0];
#pragma unroll
      for (int i = 0; i + 1 < kRows; ++i) v[i] = v[i + 1];
      return first;
    }
  };

  // A piece goes to PieceEnd::to.
  struct StorePiece {
    __device__ __forceinline__ void operator()(const PieceEnd& end, uint32_t piece) const {
      ptx::BulkStore(end.to, piece, end.bytes);
    }
  };
  // PieceEnd::of: the tile that can be told of kRows rows, or none.
  struct PublishPiece {
    const Params& p;
    __device__ __forceinline__ void operator()(const PieceEnd& end, int number) const {
      if (end.of == kNone) return;
      Delay(DelaySite::kDispatch, ~number);
      ptx::FenceAsyncGlobal();
      ptx::AddRelease(p.counters.x_ready + end.of, kRows);
    }
  };

  __device__ __forceinline__ int Claim() {
    return static_cast<int>(atomicAdd(p_.counters.next_row, unsigned{kRows}));
  }

  // Claims are made two ahead and their slots read one ahead: neither latency is waited for.
  __device__ __forceinline__ void Walk() {
    if constexpr (Steps::kZeroPads) zeros_.Write();
    const int num_rows = p_.plan.expert_start[p_.dims.experts_per_rank()];
    int first = Claim();
    int next = Claim();
    Slots slots = ReadSlots(first, num_rows);
    while (first < num_rows) {
      const int after = Claim();
      const Slots next_slots = ReadSlots(next, num_rows);
      CopyRows(first, slots);
      first = next;
      next = after;
      slots = next_slots;
    }
    ring_.Drain();
  }

  __device__ __forceinline__ Slots ReadSlots(int first, int num_rows) const {
    if (first >= num_rows) return {};
    const int4* slots = reinterpret_cast<const int4*>(p_.plan.row_slot + first);
    const int4 low = slots[0], high = slots[1];
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }

  __device__ __forceinline__ void CopyRows(int first, Slots slots) {
    const TraceScope trace(p_.trace, kDispatch, true);
    const int tile = first / kTileRows;
    const int num_rows = NumRows(slots);
    if constexpr (Steps::kZeroPads) ZeroPads(first, num_rows);
    // Pads are told of with the last row of a claim, or by themselves.
    if (num_rows == 0) ptx::AddRelease(p_.counters.x_ready + tile, kRows);
    int slot = slots.TakeFirst();
    for (int row = first; slot >= 0; ++row) {
      const int next_slot = row + 1 < first + kRows ? slots.TakeFirst() : kNone;
      CopyRow(slot, row, next_slot < 0 ? tile : kNone);
      slot = next_slot;
    }
  }

  static __device__ __forceinline__ int NumRows(const Slots& slots) {
    int num_rows = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) num_rows += slots.v[i] >= 0;
    return num_rows;
  }

  // done: PieceEnd::of of the last piece.
  __device__ __forceinline__ void CopyRow(int slot, int row, int done) {
    const int64_t to = int64_t{row} * p_.H;
#pragma unroll
    for (int i = 0; i < Steps::kDispatched; ++i) {
      const bool of_choices = HasFault(SeededFault::kDyOfChoices) && i > 0;
      const int token = of_choices ? slot % p_.dims.T : slot / p_.dims.K;
      const uint4* from = Steps::DispatchFrom(p_, i, token);
      uint4* const pool = Steps::DispatchTo(p_, i);
      for (int column = 0; column < p_.H; column += kPieceColumns) {
        const int columns = min(kPieceColumns, p_.H - column);
        const bool is_last = i + 1 == Steps::kDispatched && column + columns == p_.H;
        const uint32_t bytes = columns * 2;
        ring_.Load(from + column / kVector, bytes,
                   {pool + (to + column) / kVector, bytes, is_last ? done : kNone});
      }
    }
  }

  // Zeros the pads of a claim, before anything that the claim's end announces is stored: what is
  // waited for then covers them. Pads that are told of by themselves are waited for here.
  __device__ __forceinline__ void ZeroPads(int first, int num_rows) {
    if (num_rows == kRows || HasFault(SeededFault::kPadsNotZeroed)) return;
    if (zeros_.Store(first + num_rows, first + kRows) && num_rows == 0) {
      ptx::StoreWaitAll();
      ptx::FenceAsyncGlobal();
    }
  }

  const Params& p_;
  PieceRing<StorePiece, PublishPiece> ring_;
  const PadZeros<Steps> zeros_;
};

}  // namespace megamoe
