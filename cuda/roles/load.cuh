// Load: announces items and feeds the stages.
//
// reads      the plan's items; the operands of each item's products (TMA)
// writes     items and stages in shared memory, of both blocks of the pair
// waits on   item_empty, item_full, stage_empty; Step::Input of the item: what it reads was
//            claimed earlier, so that its writer makes progress whatever blocks are resident
// signals    item_full, stage_full
// threads    one warp of each block, all lanes converged; one lane issues. The first block's warp
//            claims the items for both.
//
// The blocks of a pair share an operand: of a tall item each loads half of the columns for both, of
// a wide one half of the rows. That is a third less to read from L2, which costs power and with it
// clock: products alone gained 2.4 % on an H200, 4 % beside copies.
#pragma once

#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/products.cuh"
#include "pipeline/queue.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/sync.cuh"

namespace megamoe {

template <typename Steps>
class LoadRole {
  using Params = typename Steps::Params;
  using Maps = typename Steps::Maps;

 public:
  __device__ LoadRole(SharedMemory& shared, const Maps& maps, const Params& params)
      : shared_(shared), maps_(maps), p_(params), rank_(ptx::ClusterRank()), queue_(params) {}

  __device__ void Run() {
    if (!LoadItems()) LetCopiesLand();
  }

 private:
  // K-blocks before the end of an item at which the next one is announced and its flag polled, so
  // that neither latency falls between two items.
  static constexpr int kAnnounceAhead = 8;
  static constexpr int kPollAhead = 3;

  template <typename Product>
  static constexpr uint32_t kBytesB = Product::kColumns * kBlockK * 2;

  // False when a wait gave up: then nothing may be copied any more, least of all to the peer.
  __device__ __forceinline__ bool LoadItems() {
    ExpectItem();
    if (rank_ == 0) {
      queue_.Claim();
      if (!AnnounceNext()) return false;
    }
    for (;;) {
      if (!Wait(AddressOf(shared_.item_full, slot_.index), slot_.parity)) return false;
      const TileItem item = ReadItem(shared_, slot_.index);
      slot_.Advance();
      if (item.step == kNoMoreItems) return true;
      ExpectItem();
      const bool ready = next_ready_;
      announced_ = rank_ != 0;
      next_ready_ = false;
      bool loaded = false;
      Steps::With(item.step, [&]<typename Step>() { loaded = LoadItem<Step>(item, ready); });
      if (!loaded || (!announced_ && !AnnounceNext())) return false;
    }
  }

  __device__ __forceinline__ bool Wait(uint32_t barrier, uint32_t parity) const {
    return __all_sync(kAllLanes, BarrierWait(barrier, parity, p_.wait));
  }

  __device__ __forceinline__ void ExpectItem() {
    if (ptx::ElectOne()) {
      ptx::BarrierArriveExpect(AddressOf(shared_.item_full, slot_.index), sizeof(PairItem));
    }
    __syncwarp();
  }

  // Writes the next item into the rings of both blocks, a lane each.
  __device__ __forceinline__ bool AnnounceNext() {
    announced_ = true;
    const PairItem item = queue_.Next();
    Delay(DelaySite::kLoad, ~item.row);
    const uint32_t slot = slot_.index;
    if (!Wait(AddressOf(shared_.item_empty, slot), slot_.parity ^ 1)) return false;
    const uint32_t lane = threadIdx.x % kWarpThreads;
    if (lane < kPairBlocks) {
      ptx::StoreAt(AddressOf(shared_.items, slot), AddressOf(shared_.item_full, slot), lane,
                   __builtin_bit_cast(uint4, item));
    }
    __syncwarp();
    return true;
  }

  template <typename Step>
  __device__ __forceinline__ bool WaitForInput(const TileItem& item) {
    const Flag flag = Step::Input(p_, item);
    const WaitSite site = {flag.phase, p_.wait.rank, item.expert, item.row / kTileRows};
    const auto poll = [&] { return ptx::LoadAcquire(flag.counter); };
    return BoundedWait(true, poll, flag.expected, /*pause_ns=*/32, p_.wait, site);
  }

  // Whether the next item is there and what it reads is ready.
  __device__ __forceinline__ bool PollNext() {
    bool ready = ptx::BarrierTest(AddressOf(shared_.item_full, slot_.index), slot_.parity);
    if (!__all_sync(kAllLanes, ready)) return false;
    const TileItem next = TileOf(shared_.items[slot_.index], rank_);
    if (next.step == kNoMoreItems) return false;
    Steps::With(next.step, [&]<typename Step>() { ready = IsRaised(Step::Input(p_, next)); });
    return __all_sync(kAllLanes, ready);
  }

  template <typename Step>
  __device__ __forceinline__ bool LoadItem(TileItem item, bool ready) {
    if (!ready) {
      const TraceScope trace(p_.trace, kTraceWait | Step::kPart, threadIdx.x % kWarpThreads == 0);
      if (!WaitForInput<Step>(item)) return false;
    }
    // What the flag announces was written through the generic proxy or by another block's TMA.
    ptx::FenceAsyncGlobal();
    __syncwarp();
    item.expert_row = Step::ExpertRow(p_, item);
    return LoadProducts(typename Step::Products(), item);
  }

  // A loop for each product: with two kinds of copies in one, the shorter product would be bound by
  // the instructions of this warp.
  template <typename... All>
  __device__ __forceinline__ bool LoadProducts(ProductList<All...>, const TileItem& item) {
    int behind = ProductList<All...>::NumKBlocks(p_, item);
    return (LoadProduct<All>(item, behind -= All::NumKBlocks(p_, item)) && ...);
  }

  // behind: K-blocks of the item behind this product.
  template <typename Product>
  __device__ __forceinline__ bool LoadProduct(const TileItem& item, int behind) {
    const int num_k_blocks = Product::NumKBlocks(p_, item);
    const int end = num_k_blocks + behind;
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      const uint32_t barrier = AddressOf(shared_.stage_full, stage_.index);
      Delay(DelaySite::kLoad, item.row * 64 + k);
      if (!Wait(AddressOf(shared_.stage_empty, stage_.index), stage_.parity ^ 1)) return false;
      if (ptx::ElectOne()) {
        ptx::BarrierArriveExpect(barrier, kStageABytes + kBytesB<Product>);
        LoadStage<Product>(item, k, AddressOf(shared_.stages, stage_.index), barrier);
      }
      __syncwarp();
      stage_.Advance();
      if (k == end - kAnnounceAhead && !announced_ && !AnnounceNext()) return false;
      if (k == end - kPollAhead) next_ready_ = PollNext();
    }
    return true;
  }

  // This block's share of a stage: what its own products read alone, and half of what both read.
  template <typename Product>
  __device__ __forceinline__ void LoadStage(const TileItem& item, int k, uint32_t stage,
                                            uint32_t barrier) {
    constexpr uint32_t kHalfB = kBytesB<Product> / 2;
    const uint32_t b = stage + kStageABytes;
    if (item.is_wide) {
      const int half = rank_;
      Product::template LoadRows<true>(maps_, p_, item, half, k, stage + half * ptx::kChunkBytes,
                                       barrier);
      Product::template LoadColumns<false>(maps_, p_, item, 0, k, b, barrier);
      Product::template LoadColumns<false>(maps_, p_, item, 1, k, b + kHalfB, barrier);
    } else {
      Product::template LoadRows<false>(maps_, p_, item, 0, k, stage, barrier);
      Product::template LoadRows<false>(maps_, p_, item, 1, k, stage + ptx::kChunkBytes, barrier);
      Product::template LoadColumns<true>(maps_, p_, item, rank_, k, b + rank_ * kHalfB, barrier);
    }
  }

  SharedMemory& shared_;
  const Maps& maps_;
  const Params& p_;
  const int rank_;
  ItemQueue<Steps> queue_;
  RingPosition<kNumStages> stage_;
  RingPosition<kItemSlots> slot_;  // of the next item
  bool announced_ = false;
  bool next_ready_ = false;
};

}  // namespace megamoe
