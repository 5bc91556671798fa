// Dispatch: copies each token's row to its pool rows, and zeros to the pads.
//
// reads      row_slot of the plan; x
// writes     the pool; zeros to y for tokens without a route
// waits on   nothing: hence every row is written whatever blocks are resident
// signals    x_ready of the row's tile: +1 for each row
// threads    any warps; each claims kRows rows at a time, in pool order
#pragma once

#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "shared/forward.h"

namespace megamoe {

class DispatchRole {
 public:
  __device__ explicit DispatchRole(const ForwardParams& params)
      : p_(params),
        row_vectors_(params.H / kVector),
        num_rows_(params.plan.expert_start[params.dims.experts_per_rank()]),
        lane_(threadIdx.x % kWarpThreads) {}

  // Copies rows until none is left, or for at most `max_claims` claims.
  __device__ void Run(int max_claims) {
    int claimed = Claim();
    for (int i = 0; i < max_claims; ++i) {
      const int first = __shfl_sync(kAllLanes, claimed, 0);
      if (first >= num_rows_) break;
      const int slot = p_.plan.row_slot[first + lane_ % kRows];
      if (i + 1 < max_claims) claimed = Claim();
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) CopyRow(first + r, __shfl_sync(kAllLanes, slot, r));
    }
    Publish();
  }

  // Writes 0 to y for this block's share of the tokens that have no route: nobody waits for them.
  __device__ void ZeroUnrouted(int warp, int num_warps) {
    const int first = warp * kWarpThreads;
    for (int base = first; base < p_.dims.T; base += num_warps * kWarpThreads) {
      const int token = base + lane_;
      bool unrouted = token < p_.dims.T;
      for (int k = 0; unrouted && k < p_.dims.K; ++k) {
        unrouted = p_.plan.slot_row[token * p_.dims.K + k] < 0;
      }
      for (unsigned todo = __ballot_sync(kAllLanes, unrouted); todo != 0; todo &= todo - 1) {
        uint4* y = p_.y + int64_t{base + __ffs(todo) - 1} * row_vectors_;
        for (int c = lane_; c < row_vectors_; c += kWarpThreads) y[c] = uint4{0, 0, 0, 0};
      }
    }
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static constexpr int kVector = 8;     // bf16 in 16 bytes
  static constexpr int kRows = 1;       // of a claim
  static constexpr int kInFlight = 8;   // loads of a lane
  static_assert(kTileRows % kRows == 0, "a claim lies in one tile");

  __device__ __forceinline__ int Claim() {
    return lane_ == 0 ? static_cast<int>(atomicAdd(p_.counters.next_row, unsigned{kRows})) : 0;
  }

  // Publishes the row written last. Called after the first loads of the next row are issued, which
  // hides the latency of the release.
  __device__ __forceinline__ void Publish() {
    if (unpublished_ < 0) return;
    ptx::FenceAsyncGlobal();
    __syncwarp();
    if (lane_ == 0) ptx::AddRelease(p_.counters.x_ready + unpublished_ / kTileRows, 1);
    unpublished_ = -1;
  }

  __device__ __forceinline__ void CopyRow(int row, int slot) {
    const uint4* from = p_.x + int64_t{slot < 0 ? 0 : slot / p_.dims.K} * row_vectors_;
    uint4* to = p_.pool + int64_t{row} * row_vectors_;
#pragma unroll 1
    for (int c = lane_; c < row_vectors_; c += kInFlight * kWarpThreads) {
      uint4 v[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int column = c + i * kWarpThreads;
        v[i] = slot >= 0 && column < row_vectors_ ? ptx::LoadReadOnly(from + column)
                                                  : uint4{0, 0, 0, 0};
      }
      Publish();
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int column = c + i * kWarpThreads;
        if (column < row_vectors_) ptx::Store(to + column, v[i]);
      }
    }
    Publish();  // only where no column fell to this lane's warp
    unpublished_ = row;
  }

  const ForwardParams& p_;
  const int row_vectors_;
  const int num_rows_;
  const int lane_;
  int unpublished_ = -1;
};

}  // namespace megamoe
