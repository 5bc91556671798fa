// Combine: sums each token's rows by the contract's tree.
//
// reads      token_order, slot_row of the plan; expert_idx, the weights of Steps; Steps::Rows
// writes     Steps::Sums, and what Steps::FinishRoute does for each route of a token
// waits on   Steps::RowsDone of each row's tile: its items were claimed before or will be by
//            running warps; batch_full
// signals    nothing
// threads    any warps; each claims one token at a time, in the order in which sums become ready
//
// Rows come in batches through shared memory by bulk copies: one warp keeps tens of KB on their
// way, where loads into registers would leave it waiting for memory.
//
// A token's routes of one expert block are added in choice order, the blocks by a balanced binary
// tree. A block without a route adds +0, which changes no sum but -0. A product is fused into its
// sum (fmaf).
#pragma once

#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "shared/part.h"

namespace megamoe {

template <typename Steps, int kNumBatches>
class CombineRole {
  using Params = typename Steps::Params;

 public:
  // Sums with a ring of batches, whose barriers are those from `batch_full` on.
  __device__ CombineRole(const Params& params, Batch* batches, uint32_t batch_full)
      : p_(params), batches_(batches), batch_full_(batch_full), lane_(threadIdx.x % kWarpThreads) {}

  __device__ void Run() {
    PrefetchToken();
    PrefetchToken();
    PrefetchToken();
    NextToken();
    for (;;) {
      while (num_in_flight_ < kNumBatches && token_ >= 0 && RowsAreReady()) IssueBatch();
      if (num_in_flight_ == 0) return;
      SumBatch();
    }
  }

 private:
  // A lane sums two vectors of columns, kVectorStride apart.
  static constexpr int kVectors = 2;
  static constexpr int kVectorStride = kWarpThreads * kVector;
  static_assert(kVectors * kVectorStride * 2 == kBatchBytes / kMinBatchRows, "a whole row");

  struct Sum {
    float v[kVectors][kVector];

    __device__ __forceinline__ void Add(const Sum& other) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) v[i][j] += other.v[i][j];
      }
    }
    __device__ __forceinline__ void AddScaled(float scale, int i, uint4 row) {
      const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        v[i][2 * j] = Kept(fmaf(scale, ptx::LowBf16(words[j]), v[i][2 * j]));
        v[i][2 * j + 1] = Kept(fmaf(scale, ptx::HighBf16(words[j]), v[i][2 * j + 1]));
      }
    }
    static __device__ __forceinline__ float Kept(float sum) {
      return HasFault(SeededFault::kTokensInBf16) ? ptx::LowBf16(ptx::PackBf16(sum, 0)) : sum;
    }
    __device__ __forceinline__ uint4 Packed(int i) const {
      return {ptx::PackBf16(v[i][0], v[i][1]), ptx::PackBf16(v[i][2], v[i][3]),
              ptx::PackBf16(v[i][4], v[i][5]), ptx::PackBf16(v[i][6], v[i][7])};
    }
  };

  // Walks the rows of a batch.
  struct Rows {
    const Batch& batch;
    const uint32_t row_bytes;
    uint32_t address;  // of the lane's first vector in row `row`
    int row = 0;

    // The sum of the next rows up to `end`.
    __device__ __forceinline__ Sum Take(int end) {
      Sum sum = {};
#pragma unroll 1
      for (; row < end; ++row, address += row_bytes) {
        const float weight = batch.weight[row];
        uint4 vectors[kVectors];
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
          vectors[i] = ptx::LoadShared(address + i * kVectorStride * 2);
        }
#pragma unroll
        for (int i = 0; i < kVectors; ++i) sum.AddScaled(weight, i, vectors[i]);
      }
      return sum;
    }
  };

  // The sum of 2^kLevel blocks from kBlock on.
  template <int kLevel, int kBlock>
  static __device__ __forceinline__ Sum Tree(Rows& rows, uint64_t block_ends) {
    if constexpr (kLevel == 0) {
      return rows.Take(static_cast<int>(block_ends >> 8 * kBlock & 0xff));
    } else {
      Sum sum = Tree<kLevel - 1, kBlock>(rows, block_ends);
      sum.Add(Tree<kLevel - 1, kBlock + (1 << (kLevel - 1))>(rows, block_ends));
      return sum;
    }
  }

  // ---- tokens: claim -> place in the order -> routes, each a memory latency ahead of its use ----

  __device__ __forceinline__ void PrefetchToken() {
    next_token_ = placed_token_;
    next_row_ = -1;
    if (next_token_ >= 0 && lane_ < p_.dims.K) {
      const int slot = next_token_ * p_.dims.K + lane_;
      next_row_ = p_.plan.slot_row[slot];
      next_weight_ = Steps::Weight(p_, slot);
      next_expert_ = p_.expert_idx[slot];
    }
    const int place = __shfl_sync(kAllLanes, claim_, 0);
    placed_token_ = place >= 0 && place < p_.dims.R * p_.dims.T ? p_.plan.token_order[place] : -1;
    if (lane_ == 0) claim_ = static_cast<int>(atomicAdd(p_.counters.next_token, 1u));
  }

  // Takes the prefetched token.
  __device__ __forceinline__ void NextToken() {
    token_ = next_token_;
    row_ = next_row_;
    weight_ = next_weight_;
    const int block = row_ >= 0 ? next_expert_ / p_.experts_per_block : kTreeBlocks;
    const unsigned earlier_lanes = (1u << lane_) - 1;
    num_routes_ = 0;
    block_ends_ = 0;
#pragma unroll
    for (int b = 0; b < kTreeBlocks; ++b) {
      const unsigned lanes = __ballot_sync(kAllLanes, block == b);
      if (b == block) place_ = num_routes_ + __popc(lanes & earlier_lanes);
      num_routes_ += __popc(lanes);
      block_ends_ |= static_cast<uint64_t>(num_routes_) << 8 * b;
    }
    is_ready_ = false;
    column_ = 0;
    PrefetchToken();
  }

  // Whether the rows of the current token are complete. Waits for it only when nothing else is to
  // do.
  __device__ __forceinline__ bool RowsAreReady() {
    if (is_ready_ || HasFault(SeededFault::kSumBeforeRows)) return true;
    const int tile = max(row_, 0) / kTileRows;
    const Flag flag = Steps::RowsDone(p_, tile);
    if (!__all_sync(kAllLanes, row_ < 0 || IsRaised(flag))) {
      if (num_in_flight_ > 0) return false;
      WaitForFlags(row_ >= 0, flag, /*pause_ns=*/200, p_.wait, -1, tile);
    }
    ptx::FenceAsyncGlobal();  // written by TMA; each lane copies the row it looked after
    is_ready_ = true;
    return true;
  }

  // ---- batches: all routes of a token, and as many columns as fit ----

  // Of a batch whose first column is `column`.
  __device__ __forceinline__ int NumColumns(uint32_t row_bytes, int column) const {
    return min(static_cast<int>(row_bytes) / 2, p_.H - column);
  }

  // Starts the copies of the next batch of the current token.
  __device__ __forceinline__ void IssueBatch() {
    Delay(DelaySite::kCombine, token_ * 64 + column_ / kVectorStride);
    Batch& batch = batches_[issue_];
    const uint32_t barrier = batch_full_ + issue_ * sizeof(uint64_t);
    const uint32_t row_bytes = BatchRowBytes(num_routes_);
    const int columns = NumColumns(row_bytes, column_);
    if (lane_ == 0) {
      batch.token = token_;
      batch.column = column_;
      batch.num_rows = num_routes_;
      batch.block_ends = block_ends_;
      ptx::BarrierArriveExpect(barrier, num_routes_ * columns * 2);
    }
    __syncwarp();
    if (row_ >= 0) {
      batch.weight[place_] = weight_;
      const uint4* from = Steps::Rows(p_) + (int64_t{row_} * p_.H + column_) / kVector;
      ptx::BulkLoad(ptx::SharedAddress(batch.rows) + place_ * row_bytes, from, columns * 2,
                    barrier);
    }
    __syncwarp();
    // Behind the copies, which take longer.
    if (column_ == 0 && lane_ < p_.dims.K) {
      Steps::FinishRoute(p_, token_ * p_.dims.K + lane_, row_);
    }
    if (++issue_ == kNumBatches) issue_ = 0;
    ++num_in_flight_;
    column_ += columns;
    if (column_ == p_.H) NextToken();
  }

  // Sums the oldest batch.
  __device__ __forceinline__ void SumBatch() {
    const TraceScope trace(p_.trace, kCombine, lane_ == 0);
    ptx::BarrierWait(batch_full_ + sum_.index() * sizeof(uint64_t), sum_.parity());
    const Batch& batch = batches_[sum_.index()];
    Delay(DelaySite::kCombine, ~batch.token);
    const int num_rows = batch.num_rows;
    const uint32_t row_bytes = BatchRowBytes(num_rows);
    const int columns = NumColumns(row_bytes, batch.column);
    const int64_t first = int64_t{batch.token} * p_.H + batch.column;
    Rows rows = {batch, row_bytes, ptx::SharedAddress(batch.rows) + lane_ * kVector * 2};
    const Sum sum = Tree<kTreeLevels, 0>(rows, batch.block_ends);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int column = lane_ * kVector + i * kVectorStride;
      if (column < columns) Steps::Sums(p_)[(first + column) / kVector] = sum.Packed(i);
    }
    // The batch is free for the next copy: every lane has read it.
    __syncwarp();
    sum_.Advance();
    --num_in_flight_;
  }

  const Params& p_;
  Batch* const batches_;
  const uint32_t batch_full_;
  const int lane_;

  // The next tokens; claim_ in lane 0, a route in each lane.
  int claim_ = -1;
  int placed_token_ = -1;
  int next_token_ = -1;
  int next_row_ = -1;
  int next_expert_ = 0;
  float next_weight_ = 0;
  // The token whose batches are issued; -1 for no more.
  int token_ = -1;
  int num_routes_ = 0;
  bool is_ready_ = false;
  int column_ = 0;
  // The lane's route: its pool row or -1, its place in the order of the sum.
  int row_ = -1;
  float weight_ = 0;
  int place_ = 0;
  uint64_t block_ends_ = 0;  // a byte a block: routes of the blocks up to it
  // The ring of batches.
  int issue_ = 0;
  RingPosition<kNumBatches> sum_;
  int num_in_flight_ = 0;
};

// Writes 0 to the sums of the tokens that have no route, a warp's share of them. Nobody waits for
// them.
template <typename Steps>
__device__ inline void ZeroUnrouted(const typename Steps::Params& p, int warp, int num_warps) {
  const int lane = threadIdx.x % kWarpThreads;
  const int row_vectors = p.H / kVector;
  for (int base = warp * kWarpThreads; base < p.dims.T; base += num_warps * kWarpThreads) {
    const int token = base + lane;
    bool unrouted = token < p.dims.T;
    for (int k = 0; unrouted && k < p.dims.K; ++k) {
      unrouted = p.plan.slot_row[token * p.dims.K + k] < 0;
    }
    for (unsigned todo = __ballot_sync(kAllLanes, unrouted); todo != 0; todo &= todo - 1) {
      const int unrouted_token = base + __ffs(todo) - 1;
      uint4* sum = Steps::Sums(p) + int64_t{unrouted_token} * row_vectors;
      for (int c = lane; c < row_vectors; c += kWarpThreads) sum[c] = uint4{0, 0, 0, 0};
      if (lane < p.dims.K) Steps::FinishRoute(p, unrouted_token * p.dims.K + lane, -1);
    }
  }
}

}  // namespace megamoe
