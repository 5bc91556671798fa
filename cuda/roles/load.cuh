// Load: announces items and feeds the stages.
//
// reads      the plan's items; the operands of each item's products (TMA)
// writes     items and stages in shared memory, of both blocks of the pair
// waits on   item_empty, item_full, stage_empty, gate_up_made; Step::Input of the item: items that
//            were claimed earlier, or rows that dispatch warps copy without waiting for anybody
// signals    item_full, item_empty, stage_full
// threads    one warp of each block, all lanes converged; one lane issues. The first block's warp
//            claims the items for both.
//
// The blocks of a pair share an operand: of a tall item each loads half of the columns for both, of
// a wide one half of the rows. That is a third less to read from L2 in tall items, which costs
// power and with it clock: products alone gained 2.4 % on an H200, 4 % beside copies.
#pragma once

#include "comm/trace.cuh"
#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/products.cuh"
#include "pipeline/queue.cuh"
#include "pipeline/shared_memory.cuh"
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
    ExpectItem();
    if (rank_ == 0) {
      queue_.Claim();
      AnnounceNext();
    }
    bool ready = false;
    for (;;) {
      ptx::BarrierWait(AddressOf(shared_.item_full, slot_.index()), slot_.parity());
      TileItem item = ReadItem(shared_, slot_.index());
      slot_.Advance();
      if (item.step == kNoMoreItems) return;
      ExpectItem();
      int num_k_blocks = 0;
      Steps::With(item.step, [&]<typename Step>() {
        if (!ready && !HasFault(SeededFault::kLoadBeforeInput)) WaitForInput<Step>(item);
        num_k_blocks = Step::Products::NumKBlocks(p_, item);
        item.expert_row = Step::ExpertRow(p_, item);
      });
      // What the flag announces was written through the generic proxy or by another block's TMA.
      ptx::FenceAsyncGlobal();
      __syncwarp();
      ready = LoadItem(item, num_k_blocks);
    }
  }

 private:
  // K-blocks that are loaded after the next item is announced (kAnnounceAhead of its step) and
  // after its flag is polled, so that neither latency falls between two items.
  static constexpr int kPollAhead = 2;

  template <typename Product>
  static constexpr uint32_t kBytesB = Product::kColumns * kBlockK * 2;

  // Loads the item in three parts, with the announcement and the poll of the next between them.
  // Returns what the poll found.
  __device__ __forceinline__ bool LoadItem(const TileItem& item, int num_k_blocks) {
    bool next_ready = false;
    int from = 0;
#pragma unroll 1
    for (int part = 0; part < 3; ++part) {
      // Of an item that is too short, everything.
      Steps::With(item.step, [&]<typename Step>() {
        const int ahead = part == 0 ? Step::kAnnounceAhead : part == 1 ? kPollAhead : 0;
        const int to = num_k_blocks > ahead ? num_k_blocks - ahead : num_k_blocks;
        LoadBlocks(typename Step::Products(), item, from, to);
        from = max(from, to);
      });
      if (part == 0 && rank_ == 0) AnnounceNext();
      if (part == 1) next_ready = PollNext();
    }
    return next_ready;
  }

  __device__ __forceinline__ void ExpectItem() {
    if (ptx::ElectOne()) {
      ptx::BarrierArriveExpect(AddressOf(shared_.item_full, slot_.index()), sizeof(PairItem));
    }
    __syncwarp();
  }

  // Writes the next item into the rings of both blocks, a lane each.
  __device__ __forceinline__ void AnnounceNext() {
    const PairItem item = queue_.Next();
    Delay(DelaySite::kLoad, ~item.row);
    const uint32_t slot = slot_.index();
    ptx::BarrierWait(AddressOf(shared_.item_empty, slot), slot_.parity() ^ 1);
    const uint32_t lane = threadIdx.x % kWarpThreads;
    if (lane < kPairBlocks) {
      ptx::StoreAt(AddressOf(shared_.items, slot), AddressOf(shared_.item_full, slot), lane,
                   __builtin_bit_cast(uint4, item));
    }
    __syncwarp();
  }

  template <typename Step>
  __device__ __forceinline__ void WaitForInput(const TileItem& item) {
    const TraceScope trace(p_.trace, kTraceWait | Step::kPart, threadIdx.x % kWarpThreads == 0);
    WaitForFlags(true, Step::Input(p_, item), /*pause_ns=*/32, p_.wait, item.expert,
                 item.row / kTileRows);
  }

  // Whether the next item is there and what it reads is ready.
  __device__ __forceinline__ bool PollNext() {
    bool ready = ptx::BarrierTest(AddressOf(shared_.item_full, slot_.index()), slot_.parity());
    if (!__all_sync(kAllLanes, ready)) return false;
    const TileItem next = TileOf(shared_.items[slot_.index()], rank_);
    if (next.step == kNoMoreItems) return false;
    Steps::With(next.step, [&]<typename Step>() { ready = IsRaised(Step::Input(p_, next)); });
    return __all_sync(kAllLanes, ready);
  }

  // The K-blocks [from, to) of all products together, in a loop for each product: with two kinds of
  // copies in one, the smaller blocks would be bound by the instructions of this warp.
  template <typename... All>
  __device__ __forceinline__ void LoadBlocks(ProductList<All...>, const TileItem& item, int from,
                                             int to) {
    int before = 0;
    (LoadBlocks<All>(item, from, to, &before), ...);
  }

  // before: K-blocks of the products before this one, which it adds its own to.
  template <typename Product>
  __device__ __forceinline__ void LoadBlocks(const TileItem& item, int from, int to, int* before) {
    const int num_k_blocks = Product::NumKBlocks(p_, item);
    const int end = min(to - *before, num_k_blocks);
    if constexpr (!Product::kIsMultiplied) {
      if (Product::kIsMadeHere && from <= *before && *before < to) {
        ptx::BarrierWait(AddressOf(shared_.gate_up_made, 0), made_.parity());
        made_.Advance();
      }
    }
#pragma unroll 1
    for (int k = max(from - *before, 0); k < end; ++k) {
      const uint32_t barrier = AddressOf(shared_.stage_full, stage_.index());
      Delay(DelaySite::kLoad, item.row * 64 + k);
      ptx::BarrierWait(AddressOf(shared_.stage_empty, stage_.index()), stage_.parity() ^ 1);
      if (ptx::ElectOne()) {
        const uint32_t stage = AddressOf(shared_.stages, stage_.index());
        if constexpr (Product::kIsMultiplied) {
          ptx::BarrierArriveExpect(barrier, kStageABytes + kBytesB<Product>);
          LoadStage<Product>(item, k, stage, barrier);
        } else {
          ptx::BarrierArriveExpect(barrier, Product::NumBytes(p_, item, k));
          Product::Load(maps_, p_, item, k, stage, barrier);
        }
      }
      __syncwarp();
      stage_.Advance();
    }
    *before += num_k_blocks;
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
  RingPosition<1> made_;
};

}  // namespace megamoe
