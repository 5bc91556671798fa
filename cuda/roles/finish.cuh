// Finish: adds up what each rank has sent for this rank's tokens.
//
// reads      expert_idx of this rank; PeerArrays::sums and dw of this rank
// writes     y of each token, in the backward dx and dw
// waits on   PeerArrays::sums_done of the ranks that have routes of a token: work of peers, which
//            waits for none of ours that comes after it
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
    for (;;) {
      int token = 0;
      if (lane_ == 0) token = static_cast<int>(ptx::FetchIncrement(p_.counters.next_own));
      token = __shfl_sync(kAllLanes, token, 0);
      if (token >= p_.dims.T) return;
      FinishToken(token);
    }
  }

 private:
  static constexpr int kColumns = 4;  // of a lane at a time
  static constexpr int kStride = kWarpThreads * kColumns;
  // What a lane loads of a rank's sums.
  using F32Sums = float4;
  using Bf16Sums = uint2;

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
    if (p_.peers.bf16_sums) {
      AddUp<Bf16Sums>(token, ranks);
    } else {
      AddUp<F32Sums>(token, ranks);
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

  // The sums of a token.
  template <typename Sums>
  __device__ __forceinline__ void AddUp(int token, unsigned ranks) const {
    const int64_t at = int64_t{token} * (p_.H / kColumns) + lane_;
    const Sums* const from = static_cast<const Sums*>(p_.peers.sums[rank_]) + at;
    uint2* const to = reinterpret_cast<uint2*>(Steps::Sums(p_)) + at;
#pragma unroll 1
    for (int column = 0; column < p_.H; column += kStride) {
      if (column + lane_ * kColumns >= p_.H) break;
      const float4 sum = SumOfRanks(from + column / kColumns, ranks);
      to[column / kColumns] = {ptx::PackBf16(sum.x, sum.y), ptx::PackBf16(sum.z, sum.w)};
    }
  }

  // By the balanced tree over the ranks.
  template <typename Sums>
  __device__ __forceinline__ float4 SumOfRanks(const Sums* sums, unsigned ranks) const {
    float4 v[kMaxRanks];
#pragma unroll
    for (int r = 0; r < kMaxRanks; ++r) {
      v[r] = {0, 0, 0, 0};
      if (ranks >> r & 1) v[r] = Floats(sums[int64_t{r} * p_.dims.T * (p_.H / kColumns)]);
    }
#pragma unroll
    for (int width = 1; width < kMaxRanks; width *= 2) {
      if (width >= p_.dims.R) break;
#pragma unroll
      for (int r = 0; r < kMaxRanks; r += 2 * width) v[r] = Sum(v[r], v[r + width]);
    }
    return v[0];
  }
  static __device__ __forceinline__ float4 Floats(F32Sums sums) { return sums; }
  static __device__ __forceinline__ float4 Floats(Bf16Sums sums) {
    return {ptx::LowBf16(sums.x), ptx::HighBf16(sums.x), ptx::LowBf16(sums.y),
            ptx::HighBf16(sums.y)};
  }
  static __device__ __forceinline__ float4 Sum(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
  }

  const Params& p_;
  const int rank_;
  const int lane_;
};

}  // namespace megamoe
