// Share: gives the ranks of the expert group what a call reads of this one, and waits until all
// have done the same.
//
// reads      x and dy, where they are shared, expert_idx and expert_weight of this rank
// writes     PeerArrays: x and dy in the own workspace, the routing in that of every rank
// waits on   inputs_done of every rank, in the last block to come to its end: no block waits for
//            another one of the kernel
// signals    inputs_done at every rank
//
// What is overwritten was read:
//   x, dy     the rank's call before has ended, so it has got the sums of its tokens from all ranks
//             that have routes of them, and those had read their rows before they sent them.
//   routing   every rank reads all of it, also one that sends this rank nothing. So calls take
//             turns with two places: what was written to this one two calls ago is no longer read,
//             since the call before waited for the inputs of every rank, which come behind the end
//             of that rank's call before.
//   sums, dw  no rank writes those of this call before it has this rank's inputs, which come behind
//             the end of its call before, when it had read all of that.
#pragma once

#include "comm/share_inputs.h"
#include "comm/trace.cuh"
#include "comm/traffic.cuh"
#include "comm/wait.cuh"

namespace megamoe {

// Elements of 16 bytes, or of 4: a rank's part of the routing begins at no multiple of 16. Returns
// how many bytes this thread has copied.
//
// A thread loads several before it stores them: one after another they would wait for memory.
template <typename T>
__device__ inline int64_t CopyShare(T* to, const void* from, int64_t count) {
  constexpr int kAtOnce = 8;
  const int64_t stride = int64_t{gridDim.x} * kShareThreads;
  int64_t bytes = 0;
  for (int64_t first = int64_t{blockIdx.x} * kShareThreads + threadIdx.x; first < count;
       first += kAtOnce * stride) {
    T elements[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * stride;
      if (at < count) elements[i] = static_cast<const T*>(from)[at];
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t at = first + i * stride;
      if (at >= count) break;
      to[at] = elements[i];
      bytes += sizeof(T);
    }
  }
  return bytes;
}

// A block's part of them.
__device__ inline void CopyInputs(const ShareParams& p) {
  const TraceScope trace(p.trace, kTraceShare, threadIdx.x == 0);
  const int rank = p.wait.rank;
  const int64_t vectors = int64_t{p.dims.T} * p.H * 2 / static_cast<int64_t>(sizeof(uint4));
  const int64_t slots = int64_t{p.dims.T} * p.dims.K;
  if (p.x != nullptr) CopyShare(p.peers.x[rank], p.x, vectors);
  if (p.dy != nullptr) CopyShare(p.peers.dy[rank], p.dy, vectors);
  for (int r = 0; r < p.dims.R; ++r) {
    int64_t bytes = CopyShare(p.peers.expert_idx[r] + rank * slots, p.expert_idx, slots);
    bytes += CopyShare(p.peers.expert_weight[r] + rank * slots, p.expert_weight, slots);
    if (r != rank) CountTraffic<&PeerTraffic::routing_sent>(p.trace, bytes);
  }
  ptx::FenceSystem();
  __syncthreads();
}

__device__ inline void ShareInputs(const ShareParams& p) {
  CopyInputs(p);
  const int rank = p.wait.rank;
  if (threadIdx.x >= kWarpThreads) return;
  const int lane = static_cast<int>(threadIdx.x);
  unsigned ended = 0;
  if (lane == 0) ended = ptx::FetchIncrementBelow(p.peers.blocks_done, gridDim.x);
  if (__shfl_sync(kAllLanes, ended, 0) + 1 < gridDim.x) return;
  // What the other blocks have written comes before the flags. The first lane has acquired it; a
  // shuffle alone orders nothing for the others.
  __syncwarp();
  ptx::FenceSystem();
  const bool is_rank = lane < p.dims.R;
  if (is_rank) ptx::StoreReleaseSystem(p.peers.inputs_done[lane] + rank, p.peers.epoch);
  if (is_rank && lane != rank) CountTraffic<&PeerTraffic::flags_sent>(p.trace, sizeof(uint32_t));
  const TraceScope wait(p.trace, kTraceWait | kTraceShare, lane == 0);
  const WaitSite site = {Phase::kPeerInputs, lane, -1, static_cast<int32_t>(blockIdx.x)};
  const auto poll = [&] { return ptx::LoadAcquireSystem(p.peers.inputs_done[rank] + lane); };
  BoundedWait(is_rank, poll, p.peers.epoch, /*pause_ns=*/100, p.wait, site);
}

}  // namespace megamoe
