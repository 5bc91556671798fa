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

#include "comm/trace.cuh"
#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "shared/part.h"

namespace megamoe {

// kColumns: what a lane loads of a rank's sums at once, of as many ranks as there may be.
template <typename Steps, int kColumns>
class FinishRole {
  using Params = typename Steps::Params;

 public:
  __device__ explicit FinishRole(const Params& params)
      : p_(params), rank_(params.wait.rank), lane_(threadIdx.x % kWarpThreads) {}

  // Tokens are claimed and their ids read one ahead: neither latency is waited for.
  __device__ void Run() {
    const int num_passes = p_.plan.totals[2];
    const int end = PartStart(p_.dims.T, p_.pass + 1, num_passes);
    const int first = PartStart(p_.dims.T, p_.pass, num_passes);
    int claim = Claim();
    int token = first + __shfl_sync(kAllLanes, claim, 0);
    claim = Claim();
    int expert = ExpertOf(token);
    while (token < end) {
      const int next = first + __shfl_sync(kAllLanes, claim, 0);
      claim = Claim();
      const int next_expert = ExpertOf(next);
      FinishToken(token, expert);
      token = next;
      expert = next_expert;
    }
  }

 private:
  struct alignas(kColumns * sizeof(float)) F32Sums {
    float v[kColumns];
    __device__ __forceinline__ F32Sums Floats() const { return *this; }
  };
  struct alignas(kColumns * sizeof(uint16_t)) Bf16Sums {
    uint32_t v[kColumns / 2];
    __device__ __forceinline__ F32Sums Floats() const {
      F32Sums sums;
#pragma unroll
      for (int i = 0; i < kColumns; ++i) {
        sums.v[i] = i % 2 == 0 ? ptx::LowBf16(v[i / 2]) : ptx::HighBf16(v[i / 2]);
      }
      return sums;
    }
  };

  // In the first lane.
  __device__ __forceinline__ int Claim() {
    return lane_ == 0 ? static_cast<int>(ptx::FetchIncrement(p_.counters.next_own)) : 0;
  }
  // Of the lane's route of an own token; those of others lie behind K.
  __device__ __forceinline__ int ExpertOf(int token) const {
    if (token >= p_.dims.T) return -1;
    const int64_t slots = int64_t{rank_ * p_.dims.T + token} * p_.dims.K;
    return p_.expert_idx[slots + min(lane_, p_.dims.K - 1)];
  }

  __device__ __forceinline__ void FinishToken(int token, int expert) {
    const TraceScope trace(p_.trace, kFinish, lane_ == 0);
    const bool is_route = lane_ < p_.dims.K && expert >= 0 && expert < p_.dims.E;
    const int owner = is_route ? expert / p_.dims.experts_per_rank() : -1;
    unsigned ranks = 0;  // that have routes of the token
    for (int r = 0; r < p_.dims.R; ++r) {
      ranks |= static_cast<unsigned>(__any_sync(kAllLanes, owner == r)) << r;
    }
    WaitForSums(ranks, token);
    Delay(DelaySite::kCombine, token);
    if (p_.peers.bf16_sums) {
      AddUpRanks<Bf16Sums>(token, ranks);
    } else {
      AddUpRanks<F32Sums>(token, ranks);
    }
    if (lane_ < p_.dims.K) Steps::TakeRoute(p_, token * p_.dims.K + lane_, is_route);
    __syncwarp();
  }

  // Lane r waits for rank r.
  __device__ __forceinline__ void WaitForSums(unsigned ranks, int token) {
    const TraceScope trace(p_.trace, kTraceWait | kFinish, lane_ == 0);
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
  __device__ __forceinline__ void AddUpRanks(int token, unsigned ranks) const {
    if (p_.dims.R == 2) {
      AddUp<Sums, 2>(token, ranks);
    } else if (p_.dims.R == 4) {
      AddUp<Sums, 4>(token, ranks);
    } else {
      AddUp<Sums, 8>(token, ranks);
    }
  }

  // As many loads on their way as there may be ranks, whatever their number.
  template <typename Sums, int kRanks>
  __device__ __forceinline__ void AddUp(int token, unsigned ranks) const {
    constexpr int kVectors = kMaxRanks / kRanks;
    const int row_vectors = p_.H / kColumns;
    const int64_t row = int64_t{token} * row_vectors;
    const Sums* const from = static_cast<const Sums*>(p_.peers.sums[rank_]) + row;
    Bf16Sums* const to = reinterpret_cast<Bf16Sums*>(Steps::Sums(p_)) + row;
#pragma unroll 1
    for (int first = lane_; first < row_vectors; first += kVectors * kWarpThreads) {
      Sums sums[kVectors][kRanks];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int vector = first + i * kWarpThreads;
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          sums[i][r] = {};
          if (vector < row_vectors && (ranks >> r & 1)) {
            sums[i][r] = from[int64_t{r} * p_.dims.T * row_vectors + vector];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int vector = first + i * kWarpThreads;
        if (vector < row_vectors) to[vector] = Rounded(SumOfRanks(sums[i]));
      }
    }
  }

  // By the balanced tree over the ranks.
  template <typename Sums, int kRanks>
  static __device__ __forceinline__ F32Sums SumOfRanks(const Sums (&sums)[kRanks]) {
    F32Sums v[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) v[r] = sums[r].Floats();
#pragma unroll
    for (int width = 1; width < kRanks; width *= 2) {
#pragma unroll
      for (int r = 0; r < kRanks; r += 2 * width) Add(v[r + width], v[r]);
    }
    return v[0];
  }
  static __device__ __forceinline__ void Add(const F32Sums& other, F32Sums& sums) {
#pragma unroll
    for (int i = 0; i < kColumns; ++i) sums.v[i] += other.v[i];
  }
  static __device__ __forceinline__ Bf16Sums Rounded(const F32Sums& sums) {
    Bf16Sums rounded;
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      rounded.v[i] = ptx::PackBf16(sums.v[2 * i], sums.v[2 * i + 1]);
    }
    return rounded;
  }

  const Params& p_;
  const int rank_;
  const int lane_;
};

}  // namespace megamoe
