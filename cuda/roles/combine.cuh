// Combine: sums each token's rows by the contract's tree.
//
// reads      token_order, slot_row of the plan; expert_idx, expert_weight; o in the pool
// writes     y
// waits on   o_done of each row's tile: its items were claimed before or will be by running warps
// signals    nothing
// threads    any warps; each claims one token at a time, in the order in which sums become ready
//
// A token's routes of one expert block are added in choice order, the blocks by a balanced binary
// tree. Four nested accumulators do that: a block's sum is added to its pair's, a pair's to its
// quad's, a quad's to the root. Each starts at +0, which no sum changes (no sum is -0), so blocks
// without a route drop out.
#pragma once

#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "shared/forward.h"

namespace megamoe {

class CombineRole {
 public:
  __device__ explicit CombineRole(const ForwardParams& params)
      : p_(params),
        row_vectors_(params.H / kVector),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void Run() {
    const int num_tokens = p_.plan.totals[1];
    int claimed = Claim();
    for (;;) {
      const int place = __shfl_sync(kAllLanes, claimed, 0);
      if (place >= num_tokens) return;
      const int token = p_.plan.token_order[place];
      claimed = Claim();
      CombineToken(token);
    }
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static constexpr int kVector = 4;    // bf16 in 8 bytes: 16 would not leave registers for the tree
  static constexpr int kInFlight = 8;  // rows of a batch; the next batch is on its way meanwhile
  static constexpr int kNoBlock = 8;

  struct Sum {
    float v[kVector];
    __device__ __forceinline__ void Clear() {
#pragma unroll
      for (float& x : v) x = 0;
    }
    // Adds `other` and clears it.
    __device__ __forceinline__ void Take(Sum& other) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) v[i] += other.v[i];
      other.Clear();
    }
    __device__ __forceinline__ void AddScaled(float scale, uint2 row) {
      v[0] = fmaf(scale, ptx::LowBf16(row.x), v[0]);
      v[1] = fmaf(scale, ptx::HighBf16(row.x), v[1]);
      v[2] = fmaf(scale, ptx::LowBf16(row.y), v[2]);
      v[3] = fmaf(scale, ptx::HighBf16(row.y), v[3]);
    }
    __device__ __forceinline__ uint2 Packed() const {
      return {ptx::PackBf16(v[0], v[1]), ptx::PackBf16(v[2], v[3])};
    }
  };

  __device__ __forceinline__ int Claim() {
    return lane_ == 0 ? static_cast<int>(atomicAdd(p_.counters.next_token, 1u)) : 0;
  }

  // One local route of the token in each of the first num_routes_ lanes, by (block, choice).
  __device__ __forceinline__ void ReadRoutes(int token) {
    const int K = p_.dims.K;
    int row = -1;
    int block = kNoBlock;
    float weight = 0;
    if (lane_ < K) {
      const int slot = token * K + lane_;
      row = p_.plan.slot_row[slot];
      weight = p_.expert_weight[slot];
      if (row >= 0) block = p_.expert_idx[slot] / (p_.dims.E / p_.num_blocks);
    }
    int place = 0;
    for (int j = 0; j < K; ++j) {
      const int other = __shfl_sync(kAllLanes, block, j);
      place += other < block || (other == block && j < lane_);
    }
    int source = 0;
    for (int j = 0; j < K; ++j) {
      if (__shfl_sync(kAllLanes, place, j) == lane_) source = j;
    }
    num_routes_ = __popc(__ballot_sync(kAllLanes, row >= 0));
    const int first_source = __shfl_sync(kAllLanes, source, 0);
    if (lane_ >= num_routes_) source = first_source;
    row_ = __shfl_sync(kAllLanes, row, source);
    weight_ = __shfl_sync(kAllLanes, weight, source);
    block = __shfl_sync(kAllLanes, block, source);
    // How many sums end behind this route: block, pair, quad.
    int next = __shfl_down_sync(kAllLanes, block, 1);
    if (lane_ + 1 >= num_routes_) next = 8 * kNoBlock;  // in no quad of a block
    num_ends_ = next == block ? 0 : next / 2 == block / 2 ? 1 : next / 4 == block / 4 ? 2 : 3;
  }

  __device__ __forceinline__ void CombineToken(int token) {
    ReadRoutes(token);
    if (lane_ < num_routes_) {
      const uint32_t* done = p_.counters.o_done + row_ / kTileRows;
      const uint32_t all = (p_.H + kDownColumns - 1) / kDownColumns;
      while (ptx::LoadRelaxed(done) < all) __nanosleep(200);
    }
    ptx::FenceAcquire();
    ptx::FenceAsyncGlobal();  // o was written by TMA
    __syncwarp();
    SumRows(reinterpret_cast<uint2*>(p_.y) + int64_t{token} * row_vectors_);
  }

  // Walks the batches of every column group, one ahead with its loads.
  __device__ __forceinline__ void SumRows(uint2* y) {
    Sum block, pair, quad, root;
    block.Clear(), pair.Clear(), quad.Clear(), root.Clear();
    uint2 rows[kInFlight];
    int column = lane_;
    int first = 0;
    Fetch(column, first, rows);
#pragma unroll 1
    while (column - lane_ < row_vectors_) {
      const bool last_batch = first + kInFlight >= num_routes_;
      const int next_first = last_batch ? 0 : first + kInFlight;
      const int next_column = last_batch ? column + kWarpThreads : column;
      uint2 next_rows[kInFlight];
      Fetch(next_column, next_first, next_rows);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        const float weight = __shfl_sync(kAllLanes, weight_, first + j);
        const int num_ends = __shfl_sync(kAllLanes, num_ends_, first + j);
        if (first + j >= num_routes_) break;
        block.AddScaled(weight, rows[j]);
        if (num_ends > 0) pair.Take(block);
        if (num_ends > 1) quad.Take(pair);
        if (num_ends > 2) root.Take(quad);
      }
      if (last_batch) {
        if (column < row_vectors_) y[column] = root.Packed();
        root.Clear();
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) rows[j] = next_rows[j];
      first = next_first;
      column = next_column;
    }
  }

  // Reads a valid row where there is no route or no column: a predicate would cost registers.
  __device__ __forceinline__ void Fetch(int column, int first, uint2 (&rows)[kInFlight]) {
    const uint2* pool = reinterpret_cast<const uint2*>(p_.pool) + min(column, row_vectors_ - 1);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int row = __shfl_sync(kAllLanes, row_, first + j);
      rows[j] = ptx::Load(pool + int64_t{row} * row_vectors_);
    }
  }

  const ForwardParams& p_;
  const int row_vectors_;
  const int lane_;
  // Of the current token; a route in each lane.
  int num_routes_ = 0;
  int row_ = -1;
  int num_ends_ = 0;
  float weight_ = 0;
};

}  // namespace megamoe
