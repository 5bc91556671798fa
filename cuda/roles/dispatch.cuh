// Dispatch: copies each token's rows, of one array or more, to its pool rows.
//
// reads      row_slot of the plan, with peers also slot_row; x, in the backward also dy, of the
//            token's rank
// writes     a pool of each; with Steps::kZeroPads also the pads that products over rows read:
//            those that share 64 rows with a row
// waits on   nothing but its own copies: hence every row is written whatever blocks are resident
// signals    x_ready of the row's tile: +1 for each row, pads included
// threads    one of each of two warps; it claims kRows rows at a time, in pool order
//
// Bulk copies through a ring of pieces in shared memory keep several rows on their way. Through
// registers, 16 bytes a lane, a row took 2.3 us of a warp and the products waited for rows.
//
// With peers a token is copied when the first of its rows is claimed, to all of them: it crosses
// once. On one GPU each row is copied by itself, since rows that are copied long before they are
// read cost as much as they save.
#pragma once

#include "comm/trace.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/piece_ring.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "shared/part.h"

namespace megamoe {

template <typename Steps>
class DispatchRole {
  using Params = typename Steps::Params;

 public:
  __device__ DispatchRole(SharedMemory& shared, const Params& params, int comm_warp)
      : p_(params), ring_(shared, comm_warp, {params}, {params}) {}

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

  // Calls f(row) for each pool row of a token. [R, T]
  template <typename F>
  static __device__ __forceinline__ void ForEachRow(const Params& p, int token, F f) {
    const int32_t* rows = p.plan.slot_row + int64_t{token} * p.dims.K;
#pragma unroll 1
    for (int k = 0; k < p.dims.K; ++k) {
      if (const int row = rows[k]; row >= 0) f(row);
    }
  }
  // A piece goes to one row, PieceEnd::to, or with peers to all rows of its token; to: in the first
  // row of the pool.
  struct StorePiece {
    const Params& p;
    __device__ __forceinline__ void operator()(const PieceEnd& end, uint32_t piece) const {
      if constexpr (Steps::kHasPeers) {
        ForEachRow(p, end.of / 2, [&](int row) {
          ptx::BulkStore(end.to + int64_t{row} * p.H / kVector, piece, end.bytes);
        });
      } else {
        ptx::BulkStore(end.to, piece, end.bytes);
      }
    }
  };
  // PieceEnd::of: the tile that can be told of kRows rows, or none; with peers twice the token,
  // plus 1 behind its last piece, when the tile of each of its rows can be told of one.
  struct PublishPiece {
    const Params& p;
    __device__ __forceinline__ void operator()(const PieceEnd& end, int number) const {
      if (Steps::kHasPeers ? end.of % 2 == 0 : end.of == kNone) return;
      Delay(DelaySite::kDispatch, ~number);
      ptx::FenceAsyncGlobal();
      if constexpr (Steps::kHasPeers) {
        ptx::FenceRelease();  // one for all rows
        ForEachRow(p, end.of / 2,
                   [&](int row) { ptx::AddRelaxed(p.counters.x_ready + row / kTileRows, 1); });
      } else {
        ptx::AddRelease(p.counters.x_ready + end.of, kRows);
      }
    }
  };

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
    // Copies read rows that peers have written by ordinary stores. What orders the two proxies
    // between kernels of one GPU does so for its own stores.
    if constexpr (Steps::kHasPeers) ptx::FenceAsyncGlobal();
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
    TraceScope trace(p_.trace, kDispatch, true);
    if constexpr (Steps::kHasPeers) {
      // The rows of an expert are ordered by source: few claims hold those of two.
      trace.MarkIfOfPeer(
          [&] { return slots.v[0] >= 0 && slots.v[0] / (p_.dims.T * p_.dims.K) != p_.wait.rank; });
    }
    const int tile = first / kTileRows;
    const int num_rows = NumRows(slots);
    if constexpr (Steps::kZeroPads) ZeroPads(first, num_rows);
    // Pads are told of by themselves, or with the last row of a claim.
    const int num_pads = kRows - num_rows;
    if (Steps::kHasPeers ? num_pads > 0 : num_rows == 0) {
      ptx::AddRelease(p_.counters.x_ready + tile, num_pads);
    }
    int slot = slots.TakeFirst();
    for (int row = first; slot >= 0; ++row) {
      const int next_slot = row + 1 < first + kRows ? slots.TakeFirst() : kNone;
      if constexpr (Steps::kHasPeers) {
        if (IsFirstRow(row, slot / p_.dims.K)) CopyToken(slot, 0, 2 * (slot / p_.dims.K), 1);
      } else {
        CopyToken(slot, row, kNone, next_slot < 0 ? tile - kNone : 0);
      }
      slot = next_slot;
    }
  }

  static __device__ __forceinline__ int NumRows(const Slots& slots) {
    int num_rows = 0;
#pragma unroll
    for (int i = 0; i < kRows; ++i) num_rows += slots.v[i] >= 0;
    return num_rows;
  }

  __device__ __forceinline__ bool IsFirstRow(int row, int token) const {
    bool is_first = true;
    ForEachRow(p_, token, [&](int other) { is_first &= other >= row; });
    return is_first;
  }

  // of: PieceEnd::of of its pieces; that of the last one is `last` more.
  __device__ __forceinline__ void CopyToken(int slot, int row, int of, int last) {
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
                   {pool + (to + column) / kVector, bytes, of + (is_last ? last : 0)});
      }
    }
  }

  __device__ __forceinline__ void WriteZeros() const {
    for (uint32_t at = 0; at < kZeroBytes; at += sizeof(uint4)) {
      ptx::StoreShared(zeros() + at, uint4{0, 0, 0, 0});
    }
    ptx::FenceAsyncShared();
  }
  __device__ __forceinline__ uint32_t zeros() const { return ring_.behind(); }

  // Zeros the pads of a claim, before anything that the claim's end announces is stored: what is
  // waited for then covers them. Pads that are told of by themselves are waited for here.
  __device__ __forceinline__ void ZeroPads(int first, int num_rows) {
    if (num_rows == kRows || HasFault(SeededFault::kPadsNotZeroed)) return;
    const int half = first / kConsumerRows * kConsumerRows;
    if (p_.plan.row_slot[half] < 0) return;  // no row in these 64, and nobody reads them
#pragma unroll 1
    for (int row = first + num_rows; row < first + kRows; ++row) ZeroRow(row);
    ptx::StoreCommit();
    if (Steps::kHasPeers || num_rows == 0) {
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

  const Params& p_;
  PieceRing<StorePiece, PublishPiece> ring_;
};

}  // namespace megamoe
