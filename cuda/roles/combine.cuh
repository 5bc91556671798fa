// Combine: sums each token's rows by the contract's tree.
//
// reads      token_order, slot_row of the plan; expert_idx, the weights of Steps; Steps::Rows
// writes     Steps::Sums, and what Steps::FinishRoute does for each route of a token
// waits on   Steps::RowsDone of each row's tile: its items were claimed before or will be by
//            running warps; batch_full
// signals    with peers PeerArrays::sums_done at the token's rank, unless the call has failed; of
//            several tokens at once, but before the warp waits for rows and before it ends
// threads    any warps; each claims one token at a time, in the order in which sums become ready
//
// Rows come in batches through shared memory by bulk copies: one warp keeps tens of KB on their
// way, where loads into registers would leave it waiting for memory.
//
// What is added to what: pipeline/batch_sum.cuh.
#pragma once

#include "comm/trace.cuh"
#include "comm/wait.cuh"
#include "pipeline/batch_sum.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
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
    if (p_.dims.T == 0) return;  // there is no slot to load
    PrefetchToken();
    PrefetchToken();
    PrefetchToken();
    NextToken();
    for (;;) {
      if (num_in_flight_ < kNumBatches && token_ >= 0 && RowsAreReady()) {
        IssueBatch();
      } else if (num_in_flight_ > 0) {
        SumBatch();
      } else {
        if constexpr (Steps::kHasPeers) RaiseFlags();
        return;
      }
    }
  }

 private:
  // A release of system scope takes a round trip over NVLink; one does for so many tokens.
  static constexpr int kMaxSummed = 4;

  using Sum = BatchSum<Steps::kSumColumns, Steps::kLaneColumns>;

  // ---- tokens: claim -> place in the order -> routes, each a memory latency ahead of its use ----

  __device__ __forceinline__ void PrefetchToken() {
    next_token_ = Taken(placed_token_);
    // What is loaded is loaded by all lanes, and nothing before its use chooses between it and
    // something else: that would wait for it.
    ptx::EndBlock();
    const int place = __shfl_sync(kAllLanes, claim_, 0);
    if (lane_ == 0) claim_ = static_cast<int>(ptx::FetchIncrement(p_.counters.next_token));
    placed_token_ = place >= 0 && place < p_.dims.R * p_.dims.T ? p_.plan.token_order[place] : -1;
    const int slot = max(next_token_, 0) * p_.dims.K + min(lane_, p_.dims.K - 1);
    next_row_ = p_.plan.slot_row[slot];
    next_weight_ = Steps::Weight(p_, slot);
    next_expert_ = p_.expert_idx[slot];
  }

  // A copy in a register of its own, so that what comes next can be loaded into that of the value.
  template <typename T>
  static __device__ __forceinline__ T Taken(T value) {
    ptx::PinRegister(value);
    return value;
  }

  // Takes the prefetched token.
  __device__ __forceinline__ void NextToken() {
    token_ = next_token_;
    row_ = token_ >= 0 && lane_ < p_.dims.K ? next_row_ : -1;
    route_.weight = Taken(next_weight_);
    PlaceRoutes();
    column_ = 0;
    PrefetchToken();
    is_ready_ = LookForRows();  // a memory latency, the same in which the next token comes
  }

  // Finds the lane's route its place in the order of the sum: walks down the tree to its block.
  __device__ __forceinline__ void PlaceRoutes() {
    const unsigned routes = __ballot_sync(kAllLanes, row_ >= 0);
    const unsigned earlier_lanes = (1u << lane_) - 1;
    unsigned before = 0;     // lanes whose routes come before, of other blocks
    unsigned node = routes;  // lanes whose routes are in the node
    int expert = next_expert_;
    uint32_t next = kNoRow;
#pragma unroll
    for (int level = kTreeLevels; level > 0; --level) {
      const int half = p_.experts_per_block << (level - 1);
      const bool is_right = expert >= half;
      const unsigned rights = __ballot_sync(kAllLanes, is_right);
      const unsigned if_left = is_right ? 0 : kAllLanes;
      if ((node & rights & if_left) != 0) next = level;
      before |= node & ~(rights | if_left);
      node &= rights ^ if_left;
      expert -= is_right ? half : 0;
    }
    const unsigned earlier = node & earlier_lanes;
    const bool is_last = (node & ~earlier_lanes) == 1u << lane_;
    if (!is_last) next = 0;
    if (AddsZero(routes, node, earlier) && next == kNoRow) next = kNoRowAddZero;
    route_.next = next;
    place_ = __popc(before) + __popc(earlier);
  }

  // Whether the sum could be -0 where the contract has +0. It has +0 if a block is without a route:
  // no sum is -0 unless all that is added to it is. A block is -0 only if a product comes close to
  // -0 and is rounded to it: not the one product of a block with a weight of 2^-16 or more, since
  // no bf16 is below 2^-133 and no float below 2^-149.
  __device__ __forceinline__ bool AddsZero(unsigned routes, unsigned block, unsigned earlier) {
    const bool is_route = row_ >= 0;
    const unsigned firsts = __ballot_sync(kAllLanes, is_route && earlier == 0);
    const bool is_alone = is_route && block == 1u << lane_;
    const bool is_never = is_alone && fabsf(route_.weight) >= 0x1p-16f;
    const int experts = Steps::kHasPeers ? p_.dims.experts_per_rank() : p_.dims.E;
    const bool has_empty = __popc(firsts) * p_.experts_per_block < experts;
    return !__any_sync(kAllLanes, is_never) && has_empty;
  }

  // The flag of the tile of the lane's row.
  __device__ __forceinline__ Flag RowDone() const {
    return Steps::RowsDone(p_, max(row_, 0) / kTileRows);
  }

  // Whether the rows of the current token are complete by now. What they are written by is TMA;
  // each lane copies the row it looked after.
  __device__ __forceinline__ bool LookForRows() {
    const bool are_done = __all_sync(kAllLanes, row_ < 0 || IsRaised(RowDone()));
    if (are_done) ptx::FenceAsyncGlobal();
    return are_done;
  }

  // Whether the current token can be summed. Waits for it only when nothing else is to do.
  __device__ __forceinline__ bool RowsAreReady() {
    if (is_ready_ || HasFault(SeededFault::kSumBeforeRows)) return true;
    if (num_in_flight_ > 0) return is_ready_ = LookForRows();
    if constexpr (Steps::kHasPeers) RaiseFlags();
    WaitForFlags(row_ >= 0, RowDone(), /*pause_ns=*/200, p_.wait, -1, max(row_, 0) / kTileRows);
    ptx::FenceAsyncGlobal();
    return is_ready_ = true;
  }

  // ---- batches: all routes of a token, and as many columns as fit ----

  // Of a row of H columns.
  __device__ __forceinline__ uint64_t FirstVector(unsigned row) const {
    return uint64_t{row} * (static_cast<unsigned>(p_.H) / kVector);
  }

  // Starts the copies of the next batch of the current token.
  __device__ __forceinline__ void IssueBatch() {
    Delay(DelaySite::kCombine, token_ * 64 + column_ / (kWarpThreads * kVector));
    Batch& batch = batches_[issue_];
    const int num_routes = __popc(__ballot_sync(kAllLanes, row_ >= 0));
    // For as many rows as the next power of two.
    const uint32_t row_bytes = kBatchBytes >> (kWarpThreads - 1 - __clz(2 * num_routes - 1));
    // Uniform over the warp, and the compiler knows it: the copies are issued one lane at a time.
    const uint32_t barrier =
        __shfl_sync(kAllLanes, batch_full_ + issue_ * static_cast<uint32_t>(sizeof(uint64_t)), 0);
    const int columns =
        __shfl_sync(kAllLanes, min(static_cast<int>(row_bytes / 2), p_.H - column_), 0);
    const unsigned vector = static_cast<unsigned>(column_) / kVector;
    if (lane_ == 0) {
      uint4* const to = Steps::SumsOf(p_, token_) + vector * Steps::SumVectors(p_);
      batch.shape = {to, static_cast<int16_t>(columns), static_cast<uint16_t>(row_bytes),
                     column_ + columns == p_.H ? token_ : -1};
      ptx::BarrierArriveExpect(barrier, num_routes * columns * 2);
      const int bytes = columns * 2 * Steps::SumVectors(p_);
      Steps::template Count<&PeerTraffic::sums_sent>(p_, token_, bytes);
    }
    if (row_ >= 0) {
      batch.routes[place_] = route_;
      const uint4* const from = Steps::Rows(p_) + FirstVector(row_) + vector;
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
    TraceScope trace(p_.trace, kCombine, lane_ == 0);
    ptx::BarrierWait(batch_full_ + sum_.index() * sizeof(uint64_t), sum_.parity());
    const Batch& batch = batches_[sum_.index()];
    const Batch::Shape shape = batch.shape;
    if constexpr (Steps::kHasPeers) {
      trace.MarkIfOfPeer([&] { return Steps::IsOfPeer(p_, shape.to); });
    }
    Delay(DelaySite::kCombine, ~static_cast<uint32_t>(shape.ended));
    const uint32_t rows_address = ptx::SharedAddress(batch.rows) + lane_ * Steps::kSumColumns * 2;
    int first = 0;
#pragma unroll 1
    do {
      BatchRows<Sum> rows = {rows_address + first * 2, batch.routes, shape.row_bytes};
      Sum sum = SumOfNode<kTreeLevels>(rows);
      if (rows.next == kNoRowAddZero) sum.AddZero();
      if constexpr (!Steps::kHasPeers) {
        Store(shape, first, shape.to, [&](int i) { return sum.Packed(i); });
      } else if (p_.peers.bf16_sums) {
        auto* const to = reinterpret_cast<uint2*>(shape.to);
        Store(shape, first, to, [&](int i) { return sum.Packed(i); });
      } else {
        auto* const to = reinterpret_cast<float4*>(shape.to);
        Store(shape, first, to, [&](int i) { return sum.Floats(i); });
      }
      first += Sum::kTurnColumns;
    } while (first < shape.columns);
    // The batch is free for the next copy: every lane has read it.
    __syncwarp();
    if constexpr (Steps::kHasPeers) {
      if (shape.ended >= 0) HasSummed(shape.ended);
    }
    sum_.Advance();
    --num_in_flight_;
  }

  // vector(i): the lane's i-th one of a turn, whose first column in the batch is `first`.
  template <typename Vector, typename F>
  __device__ __forceinline__ void Store(const Batch::Shape& shape, int first, Vector* to,
                                        F vector) const {
#pragma unroll
    for (int i = 0; i < Sum::kVectors; ++i) {
      const int column = first + i * Sum::kStride;
      if (column + lane_ * Steps::kSumColumns < shape.columns) {
        to[column / Steps::kSumColumns + lane_] = vector(i);
      }
    }
  }

  // ---- with peers: the flags of the tokens that are summed ----

  __device__ __forceinline__ void HasSummed(int token) {
    if (lane_ == num_summed_) summed_token_ = token;
    if (++num_summed_ == kMaxSummed) RaiseFlags();
  }

  // Each lane raises the flag of one token. It releases what all lanes have written, which came
  // before a __syncwarp.
  __device__ __forceinline__ void RaiseFlags() {
    // No peer takes what a failed call has summed: it waits until it gives up.
    if (lane_ < num_summed_ && !HasFailed(p_.wait)) {
      ptx::StoreReleaseSystem(Steps::SumsDone(p_, summed_token_), p_.peers.epoch);
      Steps::template Count<&PeerTraffic::flags_sent>(p_, summed_token_, sizeof(uint32_t));
    }
    num_summed_ = 0;
  }

  const Params& p_;
  Batch* const batches_;
  const uint32_t batch_full_;
  const int lane_;

  // The next tokens; claim_ in lane 0, a route in each lane.
  int claim_ = -1;
  int placed_token_ = -1;
  int next_token_ = -1;
  int next_row_ = 0;
  int next_expert_ = 0;
  float next_weight_ = 0;
  // The token whose batches are issued; -1 for no more.
  int token_ = -1;
  bool is_ready_ = false;  // see RowsAreReady
  int column_ = 0;
  // The lane's route: its pool row or -1, its place in the order of the sum.
  int row_ = -1;
  int place_ = 0;
  Batch::Route route_ = {};
  // The ring of batches.
  int issue_ = 0;
  RingPosition<kNumBatches> sum_;
  int num_in_flight_ = 0;
  // Tokens that are summed and whose flags are not raised, one in each of the first lanes.
  int num_summed_ = 0;
  int summed_token_ = 0;
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
