// Combine: sums each token's rows by the contract's tree.
//
// reads      token_order, slot_row of the plan; expert_idx, expert_weight; o
// writes     y
// waits on   o_done of each row's tile: its items were claimed before or will be by running warps;
//            batch_full
// signals    nothing
// threads    any warps; each claims one token at a time, in the order in which sums become ready
//
// Rows come in batches through shared memory by bulk copies: one warp keeps tens of KB on their
// way, where loads into registers would leave it waiting for memory.
//
// A token's routes of one expert block are added in choice order, the blocks by a balanced binary
// tree. Four nested accumulators do that: a block's sum is added to its pair's, a pair's to its
// quad's, a quad's to the root. Each starts at +0, which no sum changes (no sum is -0), so blocks
// without a route drop out. `num_ends` says how many of block, pair and quad end behind a route.
#pragma once

#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "shared/forward.h"

namespace megamoe {

class CombineRole {
 public:
  // Sums with `num_buffers` batch buffers at `buffers`, whose headers and barriers are those from
  // `first_batch` on.
  __device__ CombineRole(SharedMemory& shared, const ForwardParams& params, uint32_t buffers,
                         int first_batch, int num_buffers)
      : shared_(shared),
        p_(params),
        buffers_(buffers),
        first_batch_(first_batch),
        num_buffers_(num_buffers),
        num_tokens_(params.plan.totals[1]),
        lane_(threadIdx.x % kWarpThreads) {}

  __device__ void Run() {
    PrefetchToken();
    PrefetchToken();
    PrefetchToken();
    NextToken();
    for (;;) {
      while (num_in_flight_ < num_buffers_ && token_ >= 0 && RowsAreReady()) IssueBatch();
      if (num_in_flight_ == 0) return;
      SumBatch();
    }
  }

 private:
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
    __device__ __forceinline__ void AddScaled(float scale, uint4 row) {
      const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[2 * i] = fmaf(scale, ptx::LowBf16(words[i]), v[2 * i]);
        v[2 * i + 1] = fmaf(scale, ptx::HighBf16(words[i]), v[2 * i + 1]);
      }
    }
    __device__ __forceinline__ uint4 Packed() const {
      return {ptx::PackBf16(v[0], v[1]), ptx::PackBf16(v[2], v[3]), ptx::PackBf16(v[4], v[5]),
              ptx::PackBf16(v[6], v[7])};
    }
  };

  // ---- tokens: claim -> place in the order -> routes, each a memory latency ahead of its use ----

  __device__ __forceinline__ void PrefetchToken() {
    next_token_ = placed_token_;
    next_row_ = -1;
    if (next_token_ >= 0 && lane_ < p_.dims.K) {
      const int slot = next_token_ * p_.dims.K + lane_;
      next_row_ = p_.plan.slot_row[slot];
      next_weight_ = p_.expert_weight[slot];
      next_expert_ = p_.expert_idx[slot];
    }
    const int place = __shfl_sync(kAllLanes, claim_, 0);
    placed_token_ = place >= 0 && place < num_tokens_ ? p_.plan.token_order[place] : -1;
    if (lane_ == 0) claim_ = static_cast<int>(atomicAdd(p_.counters.next_token, 1u));
  }

  // Takes the prefetched token: one local route in each of the first num_routes_ lanes, ordered by
  // (block, choice).
  __device__ __forceinline__ void NextToken() {
    token_ = next_token_;
    int block = next_row_ >= 0 ? next_expert_ / (p_.dims.E / p_.num_blocks) : kNoBlock;
    int place = 0;
    for (int j = 0; j < p_.dims.K; ++j) {
      const int other = __shfl_sync(kAllLanes, block, j);
      place += other < block || (other == block && j < lane_);
    }
    int source = 0;
    for (int j = 0; j < p_.dims.K; ++j) {
      if (__shfl_sync(kAllLanes, place, j) == lane_) source = j;
    }
    num_routes_ = __popc(__ballot_sync(kAllLanes, next_row_ >= 0));
    row_ = __shfl_sync(kAllLanes, next_row_, source);
    weight_ = __shfl_sync(kAllLanes, next_weight_, source);
    block = __shfl_sync(kAllLanes, block, source);
    int next = __shfl_down_sync(kAllLanes, block, 1);
    if (lane_ + 1 >= num_routes_) next = 8 * kNoBlock;  // in no quad of a block
    num_ends_ = next == block ? 0 : next / 2 == block / 2 ? 1 : next / 4 == block / 4 ? 2 : 3;
    is_ready_ = false;
    first_route_ = 0;
    column_ = 0;
    PrefetchToken();
  }

  // Whether o of the current token is complete. Waits for it only when nothing else is to do.
  __device__ __forceinline__ bool RowsAreReady() {
    if (is_ready_) return true;
    const uint32_t all = (p_.H + kDownColumns - 1) / kDownColumns;
    const uint32_t* done = p_.counters.o_done + max(row_, 0) / kTileRows;
    for (;;) {
      const bool ready = lane_ >= num_routes_ || ptx::LoadRelaxed(done) >= all;
      if (__all_sync(kAllLanes, ready)) break;
      if (num_in_flight_ > 0) return false;
      __nanosleep(200);
    }
    ptx::FenceAcquire();
    ptx::FenceAsyncGlobal();  // o was written by TMA
    __syncwarp();
    is_ready_ = true;
    return true;
  }

  // ---- batches ----

  // More routes than one batch holds leave registers for the sums of half the columns only.
  __device__ __forceinline__ int ColumnsOfBatch() const {
    const int most = num_routes_ > kBatchRows ? kBatchColumns / 2 : kBatchColumns;
    return min(most, p_.H - column_);
  }

  // Starts the copies of the next batch of the current token.
  __device__ __forceinline__ void IssueBatch() {
    const int batch = first_batch_ + issue_;
    BatchHeader& header = shared_.batches[batch];
    const int num_rows = min(kBatchRows, num_routes_ - first_route_);
    const int columns = ColumnsOfBatch();
    const int row = __shfl_sync(kAllLanes, row_, (first_route_ + lane_) % kWarpThreads);
    const float weight = __shfl_sync(kAllLanes, weight_, (first_route_ + lane_) % kWarpThreads);
    uint32_t ends = __shfl_sync(kAllLanes, num_ends_, (first_route_ + lane_) % kWarpThreads);
    ends = __reduce_or_sync(kAllLanes, lane_ < num_rows ? ends << 2 * lane_ : 0u);
    const uint32_t barrier = AddressOf(shared_.batch_full, batch);
    if (lane_ == 0) {
      header.token = token_;
      header.column = column_;
      header.num_ends = static_cast<uint16_t>(ends);
      header.num_rows = static_cast<uint8_t>(num_rows);
      header.is_first = first_route_ == 0;
      header.is_last = first_route_ + num_rows == num_routes_;
      ptx::BarrierArriveExpect(barrier, num_rows * columns * 2);
    }
    __syncwarp();
    if (lane_ < num_rows) {
      header.weight[lane_] = weight;
      const uint4* from = p_.pool + (int64_t{row} * p_.H + column_) / kVector;
      ptx::BulkLoad(buffers_ + issue_ * kBatchBytes + lane_ * kBatchRowBytes, from, columns * 2,
                    barrier);
    }
    __syncwarp();
    if (++issue_ == num_buffers_) issue_ = 0;
    ++num_in_flight_;
    first_route_ += num_rows;
    if (first_route_ == num_routes_) {
      first_route_ = 0;
      column_ += columns;
      if (column_ == p_.H) NextToken();
    }
  }

  // Adds the oldest batch, and writes y where its token and columns are complete.
  __device__ __forceinline__ void SumBatch() {
    const TraceScope trace(p_.trace, kCombine, lane_ == 0);
    const int batch = first_batch_ + sum_;
    ptx::BarrierWait(AddressOf(shared_.batch_full, batch), sum_parity_);
    const BatchHeader& header = shared_.batches[batch];
    const int columns = min(kBatchColumns, p_.H - header.column);
    const uint32_t buffer = buffers_ + sum_ * kBatchBytes + lane_ * 16;
    // One half unless all routes are in this batch.
    const int num_halves = header.is_first && header.is_last ? 2 : 1;
#pragma unroll 1
    for (int half = 0; half < num_halves; ++half) {
      const int column = half * kBatchColumns / 2 + lane_ * kVector;
      if (header.is_first) {
        block_.Clear(), pair_.Clear(), quad_.Clear(), root_.Clear();
      }
      AddRows(header, buffer + half * kBatchRowBytes / 2);
      if (header.is_last && column < columns) {
        p_.y[(int64_t{header.token} * p_.H + header.column + column) / kVector] = root_.Packed();
      }
    }
    // The buffer is free for the next copy: every lane has read it.
    __syncwarp();
    if (++sum_ == num_buffers_) {
      sum_ = 0;
      sum_parity_ ^= 1;
    }
    --num_in_flight_;
  }

  __device__ __forceinline__ void AddRows(const BatchHeader& header, uint32_t address) {
    uint32_t ends = header.num_ends;
    const int num_rows = header.num_rows;
#pragma unroll 4
    for (int j = 0; j < kBatchRows; ++j) {
      if (j >= num_rows) break;
      block_.AddScaled(header.weight[j], ptx::LoadShared(address + j * kBatchRowBytes));
      const uint32_t num_ends = ends & 3;
      ends >>= 2;
      if (num_ends > 0) pair_.Take(block_);
      if (num_ends > 1) quad_.Take(pair_);
      if (num_ends > 2) root_.Take(quad_);
    }
  }

  SharedMemory& shared_;
  const ForwardParams& p_;
  const uint32_t buffers_;
  const int first_batch_;
  const int num_buffers_;
  const int num_tokens_;
  const int lane_;

  // The next tokens; claim_ in lane 0, the routes a lane each.
  int claim_ = -1;
  int placed_token_ = -1;
  int next_token_ = -1;
  int next_row_ = -1;
  int next_expert_ = 0;
  float next_weight_ = 0;
  // The token whose batches are issued; -1 for no more.
  int token_ = -1;
  int num_routes_ = 0;
  int row_ = -1;
  float weight_ = 0;
  uint32_t num_ends_ = 0;
  bool is_ready_ = false;
  int first_route_ = 0;
  int column_ = 0;
  // The ring of batches.
  int issue_ = 0;
  int sum_ = 0;
  uint32_t sum_parity_ = 0;
  int num_in_flight_ = 0;
  Sum block_, pair_, quad_, root_;
};

// Writes 0 to y of the tokens that have no route, a warp's share of them. Nobody waits for them.
__device__ inline void ZeroUnrouted(const ForwardParams& p, int warp, int num_warps) {
  const int lane = threadIdx.x % kWarpThreads;
  const int row_vectors = p.H / kVector;
  for (int base = warp * kWarpThreads; base < p.dims.T; base += num_warps * kWarpThreads) {
    const int token = base + lane;
    bool unrouted = token < p.dims.T;
    for (int k = 0; unrouted && k < p.dims.K; ++k) {
      unrouted = p.plan.slot_row[token * p.dims.K + k] < 0;
    }
    for (unsigned todo = __ballot_sync(kAllLanes, unrouted); todo != 0; todo &= todo - 1) {
      uint4* y = p.y + int64_t{base + __ffs(todo) - 1} * row_vectors;
      for (int c = lane; c < row_vectors; c += kWarpThreads) y[c] = uint4{0, 0, 0, 0};
    }
  }
}

}  // namespace megamoe
