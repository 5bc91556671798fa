// The queue of the kernel: a pair of blocks claims items in the order of the plan's waves, and the
// warps of both walk them.
//
// The items that an item waits for were claimed before it, and the rows are copied by warps that
// wait for nobody: the kernel finishes with any number of resident pairs.
#pragma once

#include "comm/wait.cuh"
#include "pipeline/shared_memory.cuh"
#include "shared/plan.h"

namespace megamoe {

// Used by one whole warp of the pair.
template <typename Steps>
class ItemQueue {
  using Params = typename Steps::Params;

 public:
  __device__ explicit ItemQueue(const Params& params)
      : p_(params), num_waves_(params.plan.totals[0]) {}

  // Claims the item that the next call of Next returns, a memory latency ahead of it.
  __device__ __forceinline__ void Claim() {
    if (threadIdx.x % kWarpThreads == 0) claim_ = atomicAdd(p_.counters.next_item, 1u);
  }

  // The claimed item, or the next one that belongs to this launch's parts.
  __device__ __forceinline__ PairItem Next() {
    for (;;) {
      const uint32_t claim = __shfl_sync(kAllLanes, claim_, 0);
      if (claim / kWaveItems >= num_waves_) return {kNoMoreItems, 0, {0, 0}, 0, 0, 0};
      Claim();
      const Wave wave = p_.plan.waves[claim / kWaveItems];
      const int i = wave.first + claim % kWaveItems;
      if (i >= wave.end) continue;
      const Item item = p_.plan.items[i];
      uint32_t part = 0;
      int tiles_n = 0;
      Steps::With(item.step(), [&]<typename Step>() {
        part = Step::kPart;
        tiles_n = Step::NumColumnTiles(p_);
      });
      if (p_.parts & part) return PairOf(item, tiles_n);
    }
  }

 private:
  __device__ __forceinline__ PairItem PairOf(const Item& item, int tiles_n) const {
    const int row = item.m * kTileRows;
    const bool is_wide = item.wide();
    const int8_t first = NumConsumers(row);
    const int8_t beside = item.n + 1 < tiles_n ? first : 0;
    const int8_t second = is_wide ? beside : NumConsumers(row + kTileRows);
    return {static_cast<int8_t>(item.step()), is_wide, {first, second}, item.expert, row, item.n};
  }

  __device__ __forceinline__ int8_t NumConsumers(int row) const {
    return p_.plan.row_slot[row + kConsumerRows] >= 0 ? 2 : 1;
  }

  const Params& p_;
  const uint32_t num_waves_;
  uint32_t claim_ = 0;  // in lane 0
};

// Reads the item in a slot of the ring that is full, with a whole warp, and gives the slot back.
__device__ __forceinline__ TileItem ReadItem(SharedMemory& shared, uint32_t slot) {
  const TileItem item = TileOf(shared.items[slot], ptx::ClusterRank());
  __syncwarp();
  if (ptx::ElectOne()) ptx::BarrierArriveAt(AddressOf(shared.item_empty, slot), 0);
  return item;
}

// Walks the items of the pair until the last one, or until the call has failed. Each warp of the
// multiply and store roles has its own walk; `f` gets the block's part of the item.
template <typename F>
__device__ __forceinline__ void ForEachItem(SharedMemory& shared, const WaitContext& wait, F f) {
  RingPosition<kItemSlots> slot;
  for (;;) {
    if (!BarrierWaitOfWarp(AddressOf(shared.item_full, slot.index), slot.parity, wait)) return;
    const TileItem item = ReadItem(shared, slot.index);
    slot.Advance();
    if (item.step == kNoMoreItems) return;
    f(item);
  }
}

}  // namespace megamoe
