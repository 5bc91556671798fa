// Dispatch: copies each token's row to its pool rows.
//
// reads      row_slot of the plan; x
// writes     the pool; pads stay as they are, since a row of h and o depends on its own row only
// waits on   nothing but its own copies: hence every row is written whatever blocks are resident
// signals    x_ready of the row's tile: +1 for each row, pads included
// threads    one of each of two warps; it claims kRows rows at a time, in pool order
//
// Bulk copies through a ring of pieces in shared memory keep several rows on their way. Through
// registers, 16 bytes a lane, a row took 2.3 us of a warp and the products waited for rows.
#pragma once

#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "shared/forward.h"

namespace megamoe {

class DispatchRole {
 public:
  __device__ DispatchRole(SharedMemory& shared, const ForwardParams& params, int comm_warp)
      : p_(params),
        pieces_(AddressOf(shared.combine, comm_warp * kCombineBatches)),
        piece_full_(AddressOf(shared.piece_full[comm_warp], 0)),
        ends_(shared.piece_ends[comm_warp]) {}

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
  // Pieces on their way in; the others are on their way out.
  static constexpr uint32_t kLoading = kNumPieces / 2;
  static constexpr uint32_t kStoring = kNumPieces - kLoading;
  static_assert(kNumPieces * kPieceBytes <= kCombineBatches * sizeof(Batch));
  static_assert(kLoading + kStoring < kPieceEnds, "an end is kept until it is published");

  __device__ __forceinline__ int Claim() {
    return static_cast<int>(atomicAdd(p_.counters.next_row, unsigned{kRows}));
  }

  // Claims are made two ahead and their slots read one ahead: neither latency is waited for.
  __device__ __forceinline__ void Walk() {
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
    while (num_stored_ < num_loaded_) StoreOldest();
    ptx::StoreWaitAll();
    PublishUpTo(num_stored_);
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
    if (slots.v[0] < 0) ptx::AddRelease(p_.counters.x_ready + tile, kRows);  // pads only
    int slot = slots.TakeFirst();
    for (int row = first; slot >= 0; ++row) {
      const int next_slot = row + 1 < first + kRows ? slots.TakeFirst() : kNone;
      const int64_t from = int64_t{slot / p_.dims.K} * p_.H;
      const int64_t to = int64_t{row} * p_.H;
      for (int column = 0; column < p_.H; column += kPieceColumns) {
        const int columns = min(kPieceColumns, p_.H - column);
        const bool ends_claim = next_slot < 0 && column + columns == p_.H;
        LoadPiece(from + column, to + column, columns, ends_claim ? tile : kNone);
      }
      slot = next_slot;
    }
  }

  // from, to: in bf16. end_of_tile: the tile that can be told of kRows rows behind this piece.
  __device__ __forceinline__ void LoadPiece(int64_t from, int64_t to, int columns,
                                            int end_of_tile) {
    if (num_loaded_ - num_stored_ == kLoading) StoreOldest();
    // The piece's last store has read it when all but the kStoring - 1 latest have.
    ptx::StoreWaitRead<static_cast<int>(kStoring) - 1>();
    const uint32_t piece = num_loaded_ % kNumPieces;
    const uint32_t barrier = piece_full_ + piece * sizeof(uint64_t);
    const uint32_t bytes = columns * 2;
    ends_[num_loaded_ % kPieceEnds] = {to, bytes, end_of_tile};
    ptx::BarrierArriveExpect(barrier, bytes);
    ptx::BulkLoad(pieces_ + piece * kPieceBytes, p_.x + from / kVector, bytes, barrier);
    ++num_loaded_;
  }

  __device__ __forceinline__ void StoreOldest() {
    const uint32_t piece = num_stored_ % kNumPieces;
    BarrierWait(piece_full_ + piece * sizeof(uint64_t), num_stored_ / kNumPieces % 2, p_.wait);
    Delay(DelaySite::kDispatch, num_stored_);
    const PieceEnd& end = ends_[num_stored_ % kPieceEnds];
    ptx::BulkStore(p_.pool + end.to / kVector, pieces_ + piece * kPieceBytes, end.bytes);
    ptx::StoreCommit();
    ++num_stored_;
    if (num_stored_ > kStoring) {
      ptx::StoreWait<static_cast<int>(kStoring)>();
      PublishUpTo(num_stored_ - kStoring);
    }
  }

  // Tells of the claims whose last piece is among the first `num_pieces`, which are in memory.
  __device__ __forceinline__ void PublishUpTo(uint32_t num_pieces) {
    for (; num_published_ < num_pieces; ++num_published_) {
      const int tile = ends_[num_published_ % kPieceEnds].tile;
      if (tile == kNone) continue;
      Delay(DelaySite::kDispatch, ~num_published_);
      ptx::FenceAsyncGlobal();
      ptx::AddRelease(p_.counters.x_ready + tile, kRows);
    }
  }

  const ForwardParams& p_;
  const uint32_t pieces_;
  const uint32_t piece_full_;
  PieceEnd* const ends_;
  uint32_t num_loaded_ = 0;
  uint32_t num_stored_ = 0;
  uint32_t num_published_ = 0;
};

}  // namespace megamoe
