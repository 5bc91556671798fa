// Store: moves finished chunks to memory and publishes the tile.
//
// reads      staging buffers
// writes     the result of each item (TMA)
// waits on   item_full, staging_full
// signals    item_empty, staging_empty; Step::Publish when all of the item is in memory
// threads    one warp, all lanes converged; one lane issues. A role of its own, because a consumer
//            that published would wait for its own stores before the next product.
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/queue.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace megamoe {

template <typename Steps>
class StoreRole {
  using Params = typename Steps::Params;
  using Maps = typename Steps::Maps;

 public:
  __device__ StoreRole(SharedMemory& shared, const Maps& maps, const Params& params)
      : shared_(shared), maps_(maps), p_(params) {}

  __device__ void Run() {
    ForEachItem(shared_, [&](const TileItem& item, const auto&) {
      Steps::With(item.step, [&]<typename Step>() { StoreItem<Step>(item); });
    });
    // Nobody in this call waits for what is not published.
    if (ptx::ElectOne()) ptx::StoreWaitAll();
    __syncwarp();
  }

 private:
  template <typename Step>
  __device__ __forceinline__ void StoreItem(const TileItem& item) {
    uint32_t previous = 0;  // address of the barrier of the buffer stored before
#pragma unroll 1
    for (int chunk = 0; chunk < Step::kOutChunks; ++chunk) {
#pragma unroll 1
      for (int consumer = 0; consumer < item.num_consumers; ++consumer) {
        const uint32_t buffer = chunk % kStagingBuffers;
        const uint32_t turn = consumer * kStagingBuffers + buffer;
        const uint32_t barrier = AddressOf(shared_.staging_full[consumer], buffer);
        // Its writer may first want back all the buffers that it had before.
        if (previous != 0 && !IsFull(barrier, turn)) {
          FreeLast(previous);
          previous = 0;
        }
        ptx::BarrierWait(barrier, turns_ >> turn & 1);
        turns_ ^= 1u << turn;
        Delay(DelaySite::kStore, item.row * 64 + item.n * 8 + chunk * 2 + consumer);
        if (ptx::ElectOne()) {
          if (!IsLeftOut<Step>(item)) {
            Step::StoreChunk(maps_, p_, item, consumer, chunk,
                             AddressOf(shared_.staging[consumer], buffer));
          }
          ptx::StoreCommit();
          if (previous != 0) {
            ptx::StoreWaitRead<1>();
            ptx::BarrierArrive(previous);
          }
        }
        __syncwarp();
        previous = AddressOf(shared_.staging_empty[consumer], buffer);
      }
    }
    if (previous == 0) return;  // no tile
    // The same lane issued every store: elect.sync picks it again while the warp is converged.
    if (ptx::ElectOne()) {
      ptx::StoreWaitRead<0>();
      ptx::BarrierArrive(previous);
      if constexpr (Step::kIsPublished) {
        if (!HasFault(SeededFault::kPublishBeforeStores)) ptx::StoreWaitAll();
        ptx::FenceAsyncGlobal();
        Delay(DelaySite::kStore, item.row * 64 + item.n);
        Step::Publish(p_, item);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool IsFull(uint32_t barrier, uint32_t turn) const {
    return __all_sync(kAllLanes, ptx::BarrierTest(barrier, turns_ >> turn & 1));
  }
  // Frees the buffer that was stored last.
  static __device__ __forceinline__ void FreeLast(uint32_t barrier) {
    if (ptx::ElectOne()) {
      ptx::StoreWaitRead<0>();
      ptx::BarrierArrive(barrier);
    }
    __syncwarp();
  }

  template <typename Step>
  static __device__ __forceinline__ bool IsLeftOut(const TileItem& item) {
    return HasFault(SeededFault::kEmptyExpertNotWritten) && !Step::kIsPublished && item.depth == 0;
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Params& p_;
  uint32_t turns_ = 0;  // a parity bit for each staging buffer
};

}  // namespace megamoe
