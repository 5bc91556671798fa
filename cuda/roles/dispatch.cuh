// Dispatch: copies each token, of one array or more, to all of its pool rows.
//
// reads      row_slot and slot_row of the plan; x, in the backward also dy, of the token's rank
// writes     a pool of each; of the first Steps::kZeroedArrays also the pads that products over
//            rows read: those that share 64 rows with a row
// waits on   nothing but its own copies: hence every row is written whatever blocks are resident
// signals    x_ready of the row's tile: +1 for each row, pads included
// threads    each of two warps, all lanes alike: lane k has the row of choice k. A warp claims
//            kRows rows at a time, in pool order, and copies a token when the first of its rows is
//            claimed
//
// Bulk copies through a ring of pieces in shared memory keep several tokens on their way. Through
// registers, 16 bytes a lane, a row took 2.3 us of a warp and the products waited for rows.
//
// A token is read once, and so crosses once where its rank is another one. On one GPU that is 1 %
// of a forward and backward faster than row by row.
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
      : p_(params),
        lane_(threadIdx.x % kWarpThreads),
        ring_(shared, comm_warp, {params}, {params}) {}

  // Called by a whole warp; returns when all its copies are in memory and published.
  __device__ void Run() {
    if constexpr (Steps::kZeroedArrays > 0) {
      if (lane_ == 0) WriteZeros();
    }
    // Copies read rows that peers have written by ordinary stores. What orders the two proxies
    // between kernels of one GPU does so for its own stores.
    if constexpr (Steps::kHasPeers) ptx::FenceAsyncGlobal();
    const int num_rows = p_.plan.expert_start[p_.dims.experts_per_rank()];
    claim_ = Claim();
    Claimed after = Take(num_rows);
    Claimed next = Take(num_rows);
    Rows next_rows = ReadRows(after);
    for (Claimed now = after; now.first < num_rows;) {
      const Rows rows = next_rows;
      after = Take(num_rows);
      next_rows = ReadRows(next);
      CopyTokens(now, rows);
      now = next;
      next = after;
    }
    ring_.Drain();
    __syncwarp();
  }

 private:
  static constexpr int kRows = 8;  // of a claim, in one tile
  static constexpr int kVectorBytes = sizeof(uint4);
  static_assert(kTileRows % kRows == 0);

  // A claim, and in lane i the slot of its row i.
  struct Claimed {
    int first;
    int slot;
  };
  // Of each row of a claim, all rows of its token.
  struct Rows {
    int v[kRows];
    __device__ __forceinline__ int TakeFirst() {
      const int first = v[0];
#pragma unroll
      for (int i = 0; i + 1 < kRows; ++i) v[i] = v[i + 1];
      return first;
    }
  };

  // The lane's pool row of a token, -1 for none. [R, T]
  static __device__ __forceinline__ int RowOf(const Params& p, int token) {
    const int lane = threadIdx.x % kWarpThreads;
    return lane < p.dims.K ? __ldg(p.plan.slot_row + int64_t{token} * p.dims.K + lane) : -1;
  }

  // PieceEnd::of: twice the token, plus 1 behind its last piece; to: in the first row of the pool.
  struct StorePiece {
    const Params& p;
    __device__ __forceinline__ void operator()(const PieceEnd& end, uint32_t piece) const {
      const int row = RowOf(p, end.of / 2);
      if (row >= 0) {
        const int stride = Steps::DispatchedStride(p, end.array) / kVectorBytes;
        ptx::BulkStore(end.to + int64_t{row} * stride, piece, end.bytes);
      }
    }
  };
  struct PublishPiece {
    const Params& p;
    __device__ __forceinline__ void operator()(const PieceEnd& end, int number) const {
      if (end.of % 2 == 0) return;
      Delay(DelaySite::kDispatch, ~number);
      const int row = RowOf(p, end.of / 2);
      ptx::FenceAsyncGlobal();
      if (row >= 0) ptx::AddRelease(p.counters.x_ready + row / kTileRows, 1);
    }
  };

  // ---- claims: claim -> slots -> rows, each a memory latency ahead of its use ----

  // In the first lane.
  __device__ __forceinline__ int Claim() {
    return lane_ == 0 ? static_cast<int>(atomicAdd(p_.counters.next_row, unsigned{kRows})) : 0;
  }

  __device__ __forceinline__ Claimed Take(int num_rows) {
    const int first = __shfl_sync(kAllLanes, claim_, 0);
    claim_ = Claim();
    const bool is_row = lane_ < kRows && first < num_rows;
    return {first, is_row ? p_.plan.row_slot[first + lane_] : -1};
  }

  __device__ __forceinline__ Rows ReadRows(const Claimed& claimed) const {
    Rows rows;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int slot = __shfl_sync(kAllLanes, claimed.slot, i);
      rows.v[i] = slot >= 0 ? RowOf(p_, slot / p_.dims.K) : -1;
    }
    return rows;
  }

  // ---- copies ----

  __device__ __forceinline__ void CopyTokens(const Claimed& claimed, Rows rows) {
    TraceScope trace(p_.trace, kDispatch, lane_ == 0);
    if constexpr (Steps::kHasPeers) {
      // The rows of an expert are ordered by source: few claims hold those of two.
      const auto is_of_peer = [&] {
        return claimed.slot >= 0 && claimed.slot / (p_.dims.T * p_.dims.K) != p_.wait.rank;
      };
      trace.MarkIfOfPeer(is_of_peer);
    }
    const int num_rows = __popc(__ballot_sync(kAllLanes, claimed.slot >= 0));
    if (num_rows < kRows && lane_ == 0) EndPads(claimed.first, num_rows);
#pragma unroll 1
    for (int i = 0; i < num_rows; ++i) {
      const int own = rows.TakeFirst();
      const bool is_first = !__any_sync(kAllLanes, own >= 0 && own < claimed.first + i);
      if (is_first) CopyToken(__shfl_sync(kAllLanes, claimed.slot, i));
    }
  }

  // Pads are told of by themselves.
  __device__ __forceinline__ void EndPads(int first, int num_rows) {
    if constexpr (Steps::kZeroedArrays > 0) ZeroPads(first, num_rows);
    ptx::AddRelease(p_.counters.x_ready + first / kTileRows, kRows - num_rows);
  }

  __device__ __forceinline__ void CopyToken(int slot) {
    const int token = slot / p_.dims.K;
#pragma unroll
    for (int i = 0; i < Steps::kDispatched; ++i) {
      const bool of_choices = HasFault(SeededFault::kDyOfChoices) && i > 0;
      const uint4* from = Steps::DispatchFrom(p_, i, of_choices ? slot % p_.dims.T : token);
      uint4* const pool = Steps::DispatchTo(p_, i);
      const int row_bytes = Steps::DispatchedBytes(p_, i);
      if (lane_ == 0) Steps::template Count<&PeerTraffic::inputs_read>(p_, token, row_bytes);
      for (int at = 0; at < row_bytes; at += kPieceBytes) {
        const int bytes = min(static_cast<int>(kPieceBytes), row_bytes - at);
        const bool is_last = i + 1 == Steps::kDispatched && at + bytes == row_bytes;
        ring_.Load(from + at / kVectorBytes, bytes,
                   {pool + at / kVectorBytes, static_cast<uint16_t>(bytes),
                    static_cast<uint16_t>(i), 2 * token + is_last});
      }
    }
  }

  // ---- zeros for pads ----

  // Zeros in shared memory, behind the pieces.
  static constexpr uint32_t kZeroBytes =
      (kCombineBatches * sizeof(Batch) - kNumPieces * kPieceBytes) / 16 * 16;
  static_assert(kZeroBytes >= 128, "a row has a multiple of that");

  __device__ __forceinline__ uint32_t zeros() const { return ring_.behind(); }
  __device__ __forceinline__ void WriteZeros() const {
    for (uint32_t at = 0; at < kZeroBytes; at += sizeof(uint4)) {
      ptx::StoreShared(zeros() + at, uint4{0, 0, 0, 0});
    }
    ptx::FenceAsyncShared();
  }

  // Zeros the pads of a claim, and waits until they are in memory.
  __device__ __forceinline__ void ZeroPads(int first, int num_rows) {
    if (HasFault(SeededFault::kPadsNotZeroed)) return;
    const int half = first / kConsumerRows * kConsumerRows;
    if (p_.plan.row_slot[half] < 0) return;  // no row in these 64, and nobody reads them
#pragma unroll 1
    for (int row = first + num_rows; row < first + kRows; ++row) ZeroRow(row);
    ptx::StoreCommit();
    ptx::StoreWaitAll();
    ptx::FenceAsyncGlobal();
  }

  __device__ __forceinline__ void ZeroRow(int row) const {
#pragma unroll
    for (int i = 0; i < Steps::kZeroedArrays; ++i) {
      const uint32_t row_bytes = Steps::DispatchedBytes(p_, i);
      uint4* const to =
          Steps::DispatchTo(p_, i) + int64_t{row} * (Steps::DispatchedStride(p_, i) / kVectorBytes);
      for (uint32_t at = 0; at < row_bytes; at += kZeroBytes) {
        ptx::BulkStore(to + at / kVectorBytes, zeros(), min(kZeroBytes, row_bytes - at));
      }
    }
  }

  const Params& p_;
  const int lane_;
  PieceRing<StorePiece, PublishPiece> ring_;
  int claim_ = 0;  // in the first lane
};

}  // namespace megamoe
