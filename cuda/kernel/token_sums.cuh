// Where the rows of tokens come from and where their sums go: this rank's arrays, or those of the
// rank that a token belongs to.
#pragma once

#include <cstdint>

#include "comm/traffic.cuh"
#include "pipeline/shared_memory.cuh"
#include "shared/layer.h"

namespace megamoe {

// Tokens are counted over all ranks, [R, T].
template <bool kWithPeers, typename Params>
struct TokenSums {
  static constexpr bool kHasPeers = kWithPeers;
  // What a lane stores side by side: 16 bytes of bf16 for their owner. Peers get as many of
  // float32, or 8 bytes of bf16: either way a warp fills whole lines, and NVLink carries no part of
  // one.
  static constexpr int kSumColumns = kWithPeers ? 4 : kVector;
  // What a lane sums at once: as many as its registers hold.
  static constexpr int kLaneColumns = 16;
  // Whether what is the same for a warp is computed again rather than kept in registers.
  static constexpr bool kFewRegisters = false;

  // Of the i-th array that is dispatched: what is copied of a row, and what lies from one to the
  // next, in bytes.
  static __device__ __forceinline__ int DispatchedBytes(const Params& p, int) {
    return p.H * static_cast<int>(sizeof(uint16_t));
  }
  static __device__ __forceinline__ int DispatchedStride(const Params& p, int i) {
    return DispatchedBytes(p, i);
  }

  // The row of a token in an array of T rows of its rank, row_bytes from one to the next.
  static __device__ __forceinline__ const uint4* RowOf(const Params& p, const uint4* own,
                                                       uint4* const* of_ranks, int token,
                                                       int row_bytes) {
    const int64_t row_vectors = row_bytes / static_cast<int>(sizeof(uint4));
    if constexpr (!kWithPeers) return own + token * row_vectors;
    const int source = token / p.dims.T;
    return of_ranks[source] + (token - source * p.dims.T) * row_vectors;
  }
  // Where the sums of a token go: rounded, or what this rank adds to them.
  static __device__ __forceinline__ uint4* SumsRow(const Params& p, uint4* own, int token) {
    if constexpr (!kWithPeers) return own + int64_t{token} * (p.H / kVector);
    const int source = token / p.dims.T;
    const int64_t row_vectors = p.H / kVector * SumVectors(p);
    return static_cast<uint4*>(p.peers.sums[source]) + RowAt(p, source, token) * row_vectors;
  }
  // In vectors of 16 bytes, the sums of kVector columns.
  static __device__ __forceinline__ int SumVectors(const Params& p) {
    if constexpr (!kWithPeers) return 1;
    return p.peers.bf16_sums ? 1 : 2;
  }
  // Whether these sums are another rank's.
  static __device__ __forceinline__ bool IsOfPeer(const Params& p, const uint4* sums) {
    const uint4* const own = static_cast<const uint4*>(p.peers.sums[p.wait.rank]);
    const int64_t row_vectors = p.H / kVector * SumVectors(p);
    return sums < own || sums >= own + int64_t{p.dims.R} * p.dims.T * row_vectors;
  }
  // The flag that tells the token's rank of them.
  static __device__ __forceinline__ uint32_t* SumsDone(const Params& p, int token) {
    const int source = token / p.dims.T;
    return p.peers.sums_done[source] + RowAt(p, source, token);
  }

  // Counts bytes that cross ranks for a token, unless it is one of this rank.
  template <unsigned long long PeerTraffic::* kCount>
  static __device__ __forceinline__ void Count(const Params& p, int token, int bytes) {
    if constexpr (kWithPeers) {
      if (p.trace.records == nullptr || token / p.dims.T == p.wait.rank) return;
      CountTraffic<kCount>(p.trace, bytes);
    }
  }

 private:
  // Of what this rank sends, at the token's rank. [R, T]
  static __device__ __forceinline__ int64_t RowAt(const Params& p, int source, int token) {
    return int64_t{p.wait.rank} * p.dims.T + token - source * p.dims.T;
  }
};

}  // namespace megamoe
