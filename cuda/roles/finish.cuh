// Finish: adds up what each rank has sent for this rank's tokens, those of the pass.
//
// reads      expert_idx of this rank; PeerArrays::sums and dw of this rank
// writes     y of each token, in the backward dx and dw
// waits on   PeerArrays::sums_done of the ranks that have routes of a token: work of peers, which
//            waits for none of ours that comes after it, nor for what later passes of ours do
// signals    nothing
// threads    any warps, behind their share of the sums; each claims one token at a time
//
// The ranks' sums are subtrees of the contract's tree, whose upper levels are added here. A rank
// without routes of a token has sent nothing, and is +0.
#pragma once

#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "shared/part.h"

namespace megamoe {

template <typename Steps>
class FinishRole {
  using Params = typename Steps::Params;

 public:
  __device__ explicit FinishRole(const Params& params)
      : p_(params), rank_(params.wait.rank), lane_(threadIdx.x % kWarpThreads) {}

  __device__ void Run() {
    const int num_passes = p_.plan.totals[2];
    const int first = PartStart(p_.dims.T, p_.pass, num_passes);
    const int end = PartStart(p_.dims.T, p_.pass + 1, num_passes);
    for (;;) {
      int claim = 0;
      if (lane_ == 0) claim = static_cast<int>(ptx::FetchIncrement(p_.counters.next_own));
      const int token = first + __shfl_sync(kAllLanes, claim, 0);
      if (token >= end) return;
      FinishToken(token);
    }
  }

 private:
  static constexpr int kColumns = 4;  // of a lane at a time
  static constexpr int kStride = kWarpThreads * kColumns;

  __device__ __forceinline__ void FinishToken(int token) {
    const TraceScope trace(p_.trace, kFinish, lane_ == 0);
    const int slot = (rank_ * p_.dims.T + token) * p_.dims.K + min(lane_, p_.dims.K - 1);
    const int expert = p_.expert_idx[slot];
    const bool is_route = lane_ < p_.dims.K && expert >= 0 && expert < p_.dims.E;
    const int owner = is_route ? expert / p_.dims.experts_per_rank() : -1;
    unsigned ranks = 0;  // that have routes of the token
    for (int r = 0; r < p_.dims.R; ++r) {
      ranks |= static_cast<unsigned>(__any_sync(kAllLanes, owner == r)) << r;
    }
    WaitForSums(ranks, token);
    Delay(DelaySite::kCombine, token);
    const int64_t row = int64_t{token} * p_.H;
    const float* sums = p_.peers.sums[rank_] + row + lane_ * kColumns;
    uint2* const to = reinterpret_cast<uint2*>(Steps::Sums(p_)) + row / kColumns + lane_;
#pragma unroll 1
    for (int column = 0; column < p_.H; column += kStride) {
      if (column + lane_ * kColumns >= p_.H) break;
      const float4 sum = SumOfRanks(sums + column, ranks);
      to[column / kColumns] = {ptx::PackBf16(sum.x, sum.y), ptx::PackBf16(sum.z, sum.w)};
    }
    if (lane_ < p_.dims.K) Steps::TakeRoute(p_, token * p_.dims.K + lane_, is_route);
    __syncwarp();
  }

  // Lane r waits for rank r.
  __device__ __forceinline__ void WaitForSums(unsigned ranks, int token) {
    const bool waits = ranks >> lane_ & 1;
    const uint32_t* flag =
        p_.peers.sums_done[rank_] + int64_t{min(lane_, p_.dims.R - 1)} * p_.dims.T + token;
    const auto poll = [&] { return ptx::LoadAcquireSystem(flag); };
    const WaitSite site = {Phase::kPeerSums, lane_, -1, token};
    BoundedWait(waits, poll, p_.peers.epoch, /*pause_ns=*/200, p_.wait, site);
    __syncwarp();
  }

  // By the balanced tree over the ranks.
  __device__ __forceinline__ float4 SumOfRanks(const float* sums, unsigned ranks) const {
    float4 v[kMaxRanks];
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      v[r] = {0, 0, 0, 0};
      if (ranks >> r & 1) {
        v[r] = *reinterpret_cast<const float4*>(sums + int64_t{r} * p_.dims.T * p_.H);
      }
    }
#pragma unroll
    for (int width = 1; width < kMaxRanks; width *= 2) {
      if (width >= p_.dims.R) break;
#pragma unroll
      for (int r = 0; r < kMaxRanks; r += 2 * width) v[r] = Sum(v[r], v[r + width]);
    }
    return v[0];
  }
  static __device__ __forceinline__ float4 Sum(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }

  const Params& p_;
  const int rank_;
  const int lane_;
};

}  // namespace megamoe
