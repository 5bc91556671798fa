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
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "shared/part.h"

namespace megamoe {

template <typename Steps>
class DispatchRole {
  using Params = typename Steps::Params;

 public:
  __device__ DispatchRole(SharedMemory& shared, const Params& params, int comm_warp)
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

  // Zeros in shared memory, behind the pieces.
  static constexpr uint32_t kZeroBytes =
      (kCombineBatches * sizeof(Batch) - kNumPieces * kPieceBytes) / 16 * 16;
  static_assert(kZeroBytes >= 128, "a row has a multiple of that");

  // Claims are made two ahead and their slots read one ahead: neither latency is waited for.
  __device__ __forceinline__ void Walk() {
    if constexpr (Steps::kZeroPads) WriteZeros();
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
    if constexpr (Steps::kZeroPads) ZeroPads(first, slots);
    if (slots.v[0] < 0) ptx::AddRelease(p_.counters.x_ready + tile, kRows);  // pads only
    int slot = slots.TakeFirst();
    for (int row = first; slot >= 0; ++row) {
      const int next_slot = row + 1 < first + kRows ? slots.TakeFirst() : kNone;
      const int token = slot / p_.dims.K;
      const int64_t to = int64_t{row} * p_.H;
#pragma unroll
      for (int i = 0; i < Steps::kDispatched; ++i) {
        const bool ends_row = next_slot < 0 && i + 1 == Steps::kDispatched;
        const bool of_choices = HasFault(SeededFault::kDyOfChoices) && i > 0;
        const uint4* from = Steps::DispatchFrom(p_, i, of_choices ? slot % p_.dims.T : token);
        uint4* const pool = Steps::DispatchTo(p_, i);
        for (int column = 0; column < p_.H; column += kPieceColumns) {
          const int columns = min(kPieceColumns, p_.H - column);
          const bool ends_claim = ends_row && column + columns == p_.H;
          LoadPiece(from + column / kVector, pool + (to + column) / kVector, columns,
                    ends_claim ? tile : kNone);
        }
      }
      slot = next_slot;
    }
  }

  __device__ __forceinline__ void WriteZeros() const {
    for (uint32_t at = 0; at < kZeroBytes; at += sizeof(uint4)) {
      ptx::StoreShared(zeros() + at, uint4{0, 0, 0, 0});
    }
    ptx::FenceAsyncShared();
  }
  __device__ __forceinline__ uint32_t zeros() const { return pieces_ + kNumPieces * kPieceBytes; }

  // Zeros the pads of a claim, before anything that the claim's end announces is stored: what is
  // waited for then covers them. A claim of pads alone announces them at once, so it waits here.
  __device__ __forceinline__ void ZeroPads(int first, const Slots& slots) {
    int num_rows = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) num_rows += slots.v[i] >= 0;
    if (num_rows == kRows || HasFault(SeededFault::kPadsNotZeroed)) return;
    const int half = first / kConsumerRows * kConsumerRows;
    if (p_.plan.row_slot[half] < 0) return;  // no row in these 64, and nobody reads them
#pragma unroll 1
    for (int row = first + num_rows; row < first + kRows; ++row) ZeroRow(row);
    ptx::StoreCommit();
    if (num_rows == 0) {
      ptx::StoreWaitAll();
      ptx::FenceAsyncGlobal();
    }
  }

  __device__ __forceinline__ void ZeroRow(int row) const {
    const uint32_t row_bytes = p_.H * 2;
#pragma unroll
    for (int i = 0; i < Steps::kDispatched; ++i) {
      uint4* const to = Steps::DispatchTo(p_, i) + int64_t{row} * p_.H / kVector;
      for (uint32_t at = 0; at < row_bytes; at += kZeroBytes) {
        ptx::BulkStore(to + at / sizeof(uint4), zeros(), min(kZeroBytes, row_bytes - at));
      }
    }
  }

  // end_of_tile: the tile that can be told of kRows rows behind this piece.
  __device__ __forceinline__ void LoadPiece(const uint4* from, uint4* to, int columns,
                                            int end_of_tile) {
    if (num_loaded_ - num_stored_ == kLoading) StoreOldest();
    // The piece's last store has read it when all but the kStoring - 1 latest have.
    ptx::StoreWaitRead<static_cast<int>(kStoring) - 1>();
    const uint32_t piece = num_loaded_ % kNumPieces;
    const uint32_t barrier = piece_full_ + piece * sizeof(uint64_t);
    const uint32_t bytes = columns * 2;
    ends_[num_loaded_ % kPieceEnds] = {to, bytes, end_of_tile};
    ptx::BarrierArriveExpect(barrier, bytes);
    ptx::BulkLoad(pieces_ + piece * kPieceBytes, from, bytes, barrier);
    ++num_loaded_;
  }

  __device__ __forceinline__ void StoreOldest() {
    const uint32_t piece = num_stored_ % kNumPieces;
    const uint32_t barrier = piece_full_ + piece * sizeof(uint64_t);
    ptx::BarrierWait(barrier, num_stored_ / kNumPieces % 2);
    Delay(DelaySite::kDispatch, num_stored_);
    const PieceEnd& end = ends_[num_stored_ % kPieceEnds];
    ptx::BulkStore(end.to, pieces_ + piece * kPieceBytes, end.bytes);
    ptx::StoreCommit();
    ++num_stored_;
    if (HasFault(SeededFault::kAnnounceBeforeCopies)) PublishUpTo(num_stored_);
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

  const Params& p_;
  const uint32_t pieces_;
  const uint32_t piece_full_;
  PieceEnd* const ends_;
  uint32_t num_loaded_ = 0;
  uint32_t num_stored_ = 0;
  uint32_t num_published_ = 0;
};

}  // namespace megamoe
