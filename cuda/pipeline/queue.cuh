// The queue of the kernel: a pair of blocks claims items in the order of the plan's waves, and the
// warps of both walk them.
//
// The items that an item waits for were claimed before it, and the rows are copied by warps that
// wait for nobody: the kernel finishes with any number of resident pairs.
#pragma once

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
      if (claim / kWaveItems >= num_waves_) return {kNoMoreItems, 0, 0, 0, 0, 0};
      Claim();
      const Wave wave = p_.plan.waves[claim / kWaveItems];
      const int i = wave.first + claim % kWaveItems;
      if (i >= wave.end) continue;
      const Item item = p_.plan.items[i];
      bool is_mine = false;
      PairItem pair = {};
      Steps::With(item.step(), [&]<typename Step>() {
        is_mine = p_.parts & Step::kPart;
        if (is_mine) pair = PairOf<Step>(item);
      });
      if (is_mine) return pair;
    }
  }

 private:
  template <typename Step>
  __device__ __forceinline__ PairItem PairOf(const Item& item) const {
    const int row = item.m * kTileRows;
    const int first = Step::NumConsumers(p_, row);
    const int beside = item.n + 1 < Step::NumColumnTiles(p_) ? first : 0;
    const int second = item.wide() ? beside : Step::NumConsumers(p_, row + kTileRows);
    return {static_cast<int8_t>(item.step()),
            PairItem::ShapeOf(item.wide(), first, second),
            static_cast<int16_t>(item.expert),
            Step::Depth(p_, item.expert),
            row,
            item.n};
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

// Walks the items of the pair until the last one. Each warp of the multiply and store roles has its
// own walk; `f` gets the block's part of the item, and the walk's position in the ring.
template <typename F>
__device__ __forceinline__ void ForEachItem(SharedMemory& shared, F f) {
  RingPosition<kItemSlots> slot;
  for (;;) {
    ptx::BarrierWait(AddressOf(shared.item_full, slot.index()), slot.parity());
    const TileItem item = ReadItem(shared, slot.index());
    slot.Advance();
    if (item.step == kNoMoreItems) return;
    f(item, slot);
  }
}

}  // namespace megamoe
