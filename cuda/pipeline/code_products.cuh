// Products of FP8 codes, as a warpgroup of the multiply role makes them.
//
// The sum of a K-block is that of one group of each operand. It is made by itself, for half of the
// columns at a time, and added times the scales of both operands to sums in float32. That a
// warpgroup waits for its products costs little: those of the other one run meanwhile. Two halves
// on their way at once would be serialised by ptxas (C7514).
//
// The sums take 128 registers of a thread and those of a K-block 64. Few are left for what else
// lasts meanwhile, so that what can be is computed again, beside products, and the rest is held by
// lanes.
#pragma once

#include <cstdint>

#include "pipeline/item.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "shared/fp8.h"

namespace megamoe {

// What a warp needs behind the products, and of the item meanwhile, in one register: each of a few
// lanes holds a number, which the others get by shuffles.
class HeldItem {
 public:
  // start_ns: of the item; turns, slot: the states of the staging buffers and of the walk.
  __device__ __forceinline__ HeldItem(const TileItem& item, uint32_t start_ns, uint32_t turns,
                                      uint32_t slot) {
    const uint32_t lane = threadIdx.x % kWarpThreads;
    held_ = lane == 0   ? item.row
            : lane == 1 ? item.n
            : lane == 2 ? item.expert
            : lane == 3 ? start_ns
            : lane == 4 ? turns
            : lane == 5 ? slot
                        : item.is_wide;
  }
  // But for what only other roles need.
  __device__ __forceinline__ TileItem item() const {
    TileItem item = {};
    item.row = Get(0);
    item.n = Get(1);
    item.expert = Get(2);
    item.is_wide = Get(6);
    return item;
  }
  __device__ __forceinline__ uint32_t start_ns() const { return Get(3); }
  __device__ __forceinline__ uint32_t turns() const { return Get(4); }
  __device__ __forceinline__ uint32_t slot() const { return Get(5); }

 private:
  __device__ __forceinline__ uint32_t Get(int lane) const {
    return __shfl_sync(kAllLanes, held_, lane);
  }

  uint32_t held_;
};

// The scales of both operands of a product. They come by loads: shared memory has no room left. A
// lane holds those of other K-blocks than its neighbours, which get them by shuffles, and loads the
// next ones when the last of them is taken, long before they are needed.
template <typename Product, typename Params>
class ProductScales {
 public:
  // Loads what does not depend on other work of the call.
  __device__ __forceinline__ ProductScales(const Params& p, const HeldItem& held)
      : p_(p), held_(held) {
    LoadBlocks(0);
  }

  // When the first stage of the item is full: who filled it has seen that the item's rows are
  // complete.
  __device__ __forceinline__ void Begin() { LoadRows(0); }

  struct Scales {
    float of[2];  // in the thread's rows
  };
  // What the sums of K-block k are multiplied with, in half of the columns.
  __device__ __forceinline__ Scales Of(int k, int half) const {
    const float block = __shfl_sync(kAllLanes, block_, k % kBlockLanes + half * kBlockLanes);
    const int lane = ThreadAnew() % kWarpThreads / kQuad * kQuad + k % kRowLanes;
    return {__shfl_sync(kAllLanes, row_, lane) * block,
            __shfl_sync(kAllLanes, row_, lane + kRowLanes) * block};
  }
  // K-block k is next; those before it have been taken.
  __device__ __forceinline__ void Advance(int k) {
    if (k % kRowLanes == 0) LoadRows(k);
    if (k % kBlockLanes == 0) LoadBlocks(k);
  }

 private:
  // Of the four lanes of a row two hold its scales, the others those of the row 8 below; of a warp
  // half the lanes those of half of the columns.
  static constexpr int kQuad = 4;
  static constexpr int kRowLanes = 2;
  static constexpr int kBlockLanes = kWarpThreads / 2;

  // Past the L1 cache: another multiprocessor may have written them.
  __device__ __forceinline__ void LoadRows(int k) {
    const int thread = ThreadAnew();
    const int lane = thread % kQuad;
    // The first of the thread's two rows, or the one 8 below.
    const int row = held_.item().row + (thread - kGroupThreads) / kWarpThreads * 16 +
                    thread % kWarpThreads / kQuad + lane / kRowLanes * 8;
    const RowScales& rows = Product::Rows(p_);
    row_ = __ldcg(rows.first + int64_t{row} * rows.row_floats + k + lane % kRowLanes);
  }
  // Behind the last K-block, the last again.
  __device__ __forceinline__ void LoadBlocks(int k) {
    const TileItem item = held_.item();
    const int lane = ThreadAnew() % kWarpThreads;
    const int own = min(k + lane % kBlockLanes, Product::KBlocks(p_) - 1);
    block_ = __ldg(Product::Scale(p_, item, lane / kBlockLanes, own));
  }

  const Params& p_;
  const HeldItem& held_;
  float row_;
  float block_;
};

// The product of an item. Product::KBlocks(p) says how many K-blocks it has, where it has any,
// Rows(p) has the scales of A, and Scale(p, item, half, k) says where that of half of the columns
// of B lies.
template <typename Product, typename Params>
class CodeProducts {
 public:
  __device__ __forceinline__ CodeProducts(SharedMemory& shared, const Params& params,
                                          const HeldItem& held)
      : shared_(shared), p_(params), held_(held) {}

  // Adds to sums. stage: of the ring, the next one. Calls meanwhile(k) beside products of K-block
  // k.
  template <typename F>
  __device__ __forceinline__ void AddTo(float (&sums)[128], RingPosition<kNumStages>& stage,
                                        F meanwhile) const {
    ProductScales<Product, Params> scales(p_, held_);
    uint32_t memory = ptx::SharedAddress(&shared_);
    ptx::PinRegister(memory);  // it is not made anew each time
    Wait(memory, stage);
    scales.Begin();
    float part[64];
#pragma unroll
    for (float& sum : part) sum = 0;
    Issue(part, OperandsOf(memory, stage.index()), 0);
#pragma unroll 1
    for (int k = 0;; ++k) {
      Operands operands = OperandsOf(memory, stage.index());  // anew, beside products
      stage.Advance();
      auto scale = scales.Of(k, 0);
      ptx::WgmmaWait<0>();
      AddScaled(sums, part, 0, scale.of);
      scale = scales.Of(k, 1);
      Issue(part, operands, 1);
      const bool is_last = k + 1 == Product::KBlocks(p_);
      operands = OperandsOf(memory, stage.index());
      if (!is_last) {
        scales.Advance(k + 1);
        Wait(memory, stage);
      }
      meanwhile(k);
      ptx::WgmmaWait<0>();
      ReleaseStage(memory, stage.last());
      AddScaled(sums, part, 1, scale.of);
      if (is_last) break;
      Issue(part, operands, 0);
    }
  }

 private:
  static constexpr int kStepK = 32;  // k of an instruction

  static __device__ __forceinline__ void Wait(uint32_t memory,
                                              const RingPosition<kNumStages>& stage) {
    const uint32_t barrier = memory + offsetof(SharedMemory, stage_full);
    ptx::BarrierWait(barrier + stage.index() * sizeof(uint64_t), stage.parity());
  }

  // The first words of descriptors. They are uniform over the warp, and the compiler knows it: so
  // they take no registers of lanes.
  struct Operands {
    uint32_t a;
    uint32_t b;
  };
  __device__ __forceinline__ Operands OperandsOf(uint32_t memory, uint32_t stage) const {
    const uint32_t address = memory + stage * kStageBytes;
    const auto first_word = [](uint32_t tile) {
      return __shfl_sync(kAllLanes, static_cast<uint32_t>(Descriptor(tile)), 0);
    };
    return {first_word(address + ConsumerAnew() * ptx::kChunkBytes),
            first_word(address + kStageABytes)};
  }
  static __device__ __forceinline__ uint64_t Descriptor(uint32_t tile) {
    return ptx::TileDescriptor<ptx::Major::kK>(tile);
  }
  static __device__ __forceinline__ uint32_t ConsumerAnew() {
    return ThreadAnew() / kGroupThreads - 1;
  }

  // The products of a stage, for half of the columns.
  __device__ __forceinline__ void Issue(float (&part)[64], const Operands& operands,
                                        int half) const {
    constexpr uint64_t kHalfB = (kStageBBytes / 2) >> 4;
    constexpr uint64_t kSecondWord = ptx::TileDescriptor<ptx::Major::kK>(0) >> 32 << 32;
    const uint64_t a = kSecondWord | operands.a;
    const uint64_t b = (kSecondWord | operands.b) + half * kHalfB;
    ptx::PinRegisters(part);
    ptx::WgmmaFence();
#pragma unroll
    for (int i = 0; i < kBlockCodesK / kStepK; ++i) {
      const uint64_t at = i * ptx::kDescriptor32Codes;
      ptx::WgmmaE4m3(a + at, b + at, part, /*accumulate=*/i > 0);
    }
    ptx::WgmmaCommit();
    ptx::PinRegisters(part);
  }

  static __device__ __forceinline__ void AddScaled(float (&sums)[128], float (&part)[64], int half,
                                                   const float (&scale)[2]) {
    ptx::PinRegisters(part);
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      float& sum = sums[64 * half + j];
      sum = fmaf(scale[j / 2 % 2], part[j], sum);
    }
  }

  SharedMemory& shared_;
  const Params& p_;
  const HeldItem& held_;
};

}  // namespace megamoe
