// Load: claims items and feeds the stages.
//
// reads      the plan's items; the weights and h (TMA)
// writes     items and stages in shared memory
// waits on   item_empty, stage_empty; Step::IsReady of the item: what it reads was claimed earlier,
//            so that its writer makes progress whatever blocks are resident
// signals    item_full, stage_full
// threads    one warp, all lanes converged; one lane issues
#pragma once

#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/sync.cuh"
#include "shared/plan.h"

namespace megamoe {

template <typename Steps>
class LoadRole {
  using Params = typename Steps::Params;
  using Maps = typename Steps::Maps;

 public:
  __device__ LoadRole(SharedMemory& shared, const Maps& maps, const Params& params)
      : shared_(shared), maps_(maps), p_(params), num_items_(params.plan.totals[0]) {}

  __device__ void Run() {
    Claim();
    FetchItem();
    while (next_.step != kNoMoreItems) {
      const TileItem item = next_;
      const bool ready = next_ready_;
      Announce(item);
      Claim();
      fetched_ = false;
      next_ready_ = false;
      Steps::With(item.step, [&]<typename Step>() { LoadItem<Step>(item, ready); });
      if (!fetched_) FetchItem();
    }
    Announce(next_);
  }

 private:
  // K-blocks before the end of an item at which the next one is read and its flag polled, so that
  // neither latency falls between two items.
  static constexpr int kFetchAhead = 6;
  static constexpr int kPollAhead = 3;

  __device__ __forceinline__ void Claim() {
    if (threadIdx.x % kWarpThreads == 0) claim_ = atomicAdd(p_.counters.next_item, 1u);
  }

  // Turns the claim into the next item of this launch's parts.
  __device__ __forceinline__ void FetchItem() {
    fetched_ = true;
    next_ = {kNoMoreItems, 0, 0, 0, 0};
    for (;;) {
      const uint32_t i = __shfl_sync(kAllLanes, claim_, 0);
      if (i >= num_items_) return;
      const Item item = p_.plan.items[i];
      uint32_t part = 0;
      Steps::With(item.step, [&]<typename Step>() { part = Step::kPart; });
      if (p_.parts & part) {
        const int row = item.m * kTileRows;
        const bool upper_half = p_.plan.row_slot[row + kConsumerRows] >= 0;
        next_ = {static_cast<int16_t>(item.step), static_cast<int16_t>(upper_half ? 2 : 1),
                 item.expert, row, item.n};
        return;
      }
      Claim();
    }
  }

  __device__ __forceinline__ bool PollNext() {
    bool ready = false;
    Steps::With(next_.step,
                [&]<typename Step>() { ready = Step::IsReady(p_, next_.row / kTileRows); });
    return ready;
  }

  __device__ __forceinline__ void Announce(const TileItem& item) {
    ptx::BarrierWait(AddressOf(shared_.item_empty, slot_.index), slot_.parity ^ 1);
    if (ptx::ElectOne()) {
      shared_.items[slot_.index] = item;
      ptx::BarrierArrive(AddressOf(shared_.item_full, slot_.index));
    }
    __syncwarp();
    slot_.Advance();
  }

  template <typename Step>
  __device__ __forceinline__ void LoadItem(const TileItem& item, bool ready) {
    if (!ready) {
      const TraceScope trace(p_.trace, kTraceWait | Step::kPart, threadIdx.x % kWarpThreads == 0);
      while (!Step::IsReady(p_, item.row / kTileRows)) __nanosleep(32);
    }
    // What the flag announces was written through the generic proxy or by another block's TMA.
    ptx::FenceAsyncGlobal();
    __syncwarp();
    const int num_k_blocks = Step::NumKBlocks(p_);
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      const uint32_t barrier = AddressOf(shared_.stage_full, stage_.index);
      ptx::BarrierWait(AddressOf(shared_.stage_empty, stage_.index), stage_.parity ^ 1);
      if (ptx::ElectOne()) {
        ptx::BarrierArriveExpect(barrier, kStageBytes);
        Step::LoadStage(maps_, p_, item, k, AddressOf(shared_.stages, stage_.index), barrier);
      }
      __syncwarp();
      stage_.Advance();
      if (k == num_k_blocks - kFetchAhead) FetchItem();
      if (k == num_k_blocks - kPollAhead && fetched_ && next_.step != kNoMoreItems) {
        next_ready_ = PollNext();
      }
    }
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Params& p_;
  const uint32_t num_items_;
  RingPosition<kNumStages> stage_;
  RingPosition<kItemSlots> slot_;
  uint32_t claim_ = 0;  // lane 0 only
  TileItem next_;
  bool fetched_ = false;
  bool next_ready_ = false;
};

}  // namespace megamoe
