// Multiply: the products of a tile and the arithmetic that finishes it.
//
// reads      stages in shared memory
// writes     the finished tile, in chunks of 64 rows x 64 columns, to the staging buffers
// waits on   item_full, stage_full; staging_empty, which the store warp releases
// signals    item_empty, stage_empty, staging_full
// threads    two warpgroups, 64 rows of the tile each
#pragma once

#include "comm/wait.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/queue.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/trace.cuh"
#include "ptx/wgmma.cuh"

namespace megamoe {

template <typename Steps>
class MultiplyRole {
  using Params = typename Steps::Params;

 public:
  __device__ MultiplyRole(SharedMemory& shared, const Params& params, int consumer)
      : shared_(shared), p_(params), consumer_(consumer) {}

  // Returns false when a wait gave up.
  __device__ bool Run() {
#pragma unroll
    for (int i = 0; i < 128; ++i) acc_[i] = 0;
    ForEachItem(shared_, p_.wait, [&](const TileItem& item) {
      Steps::With(item.step, [&]<typename Step>() {
        const bool is_recorder = consumer_ == 0 && item.num_consumers > 0 && IsThread0();
        const TraceScope trace(p_.trace, Step::kPart, is_recorder);
        const int num_k_blocks = Step::NumKBlocks(p_);
        Delay(DelaySite::kMultiply, item.row * 64 + item.n);
        if (consumer_ >= item.num_consumers) {
          Skip(num_k_blocks);
        } else {
          Multiply(num_k_blocks);
          Finish<Step>();
        }
      });
    });
    return came_;
  }

 private:
  __device__ __forceinline__ bool IsThread0() const { return threadIdx.x % kGroupThreads == 0; }
  __device__ __forceinline__ bool IsLane0() const { return threadIdx.x % kWarpThreads == 0; }

  __device__ __forceinline__ void WaitFor(uint32_t barrier, uint32_t parity) {
    came_ &= BarrierWait(barrier, parity, p_.wait);
  }

  // Tells both blocks of the pair, a lane each: either may copy into the stage of both. A stage
  // that did not come is kept: its copies may still be on their way.
  __device__ __forceinline__ void ReleaseStage(uint32_t stage) {
    const uint32_t lane = threadIdx.x % kWarpThreads;
    if (lane < kPairBlocks && came_)
      ptx::BarrierArriveAt(AddressOf(shared_.stage_empty, stage), lane);
  }

  // The consumer's half of the tile is all pads: only the stages are handed back.
  __device__ __forceinline__ void Skip(int num_k_blocks) {
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      WaitFor(AddressOf(shared_.stage_full, stage_.index), stage_.parity);
      ReleaseStage(stage_.index);
      stage_.Advance();
    }
  }

  __device__ __forceinline__ void Multiply(int num_k_blocks) {
    constexpr auto kA = ptx::Major::kK;
    constexpr auto kB = ptx::Major::kMN;
    uint32_t previous = 0;
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      WaitFor(AddressOf(shared_.stage_full, stage_.index), stage_.parity);
      const uint32_t address = AddressOf(shared_.stages, stage_.index);
      const uint64_t a = ptx::TileDescriptor<kA>(address + consumer_ * ptx::kChunkBytes);
      const uint64_t b = ptx::TileDescriptor<kB>(address + kStageABytes);
      ptx::PinRegisters(acc_);
      ptx::WgmmaFence();
#pragma unroll
      for (int i = 0; i < kBlockK / 16; ++i) {
        ptx::Wgmma64x256x16<kA, kB>(a + i * ptx::kDescriptor16K<kA>,
                                    b + i * ptx::kDescriptor16K<kB>, acc_, (k | i) != 0);
      }
      ptx::WgmmaCommit();
      ptx::PinRegisters(acc_);
      ptx::WgmmaWait<1>();
      // The products of the block before are complete in this warp.
      if (k > 0) ReleaseStage(previous);
      previous = stage_.index;
      stage_.Advance();
    }
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(acc_);
    ReleaseStage(previous);
  }

  template <typename Step>
  __device__ __forceinline__ void Finish() {
    const int lane = threadIdx.x % kWarpThreads;
    const int row = threadIdx.x % kGroupThreads / kWarpThreads * 16 + lane % 16;
#pragma unroll
    for (int chunk = 0; chunk < Step::kOutChunks; ++chunk) {
      const uint32_t buffer = chunk % kStagingBuffers;
      Delay(DelaySite::kMultiply, chunk + 4 * staging_turns_);
      const uint32_t base = AddressOf(shared_.staging[consumer_], buffer) + row * 128;
      WaitFor(AddressOf(shared_.staging_empty[consumer_], buffer),
              (staging_turns_ >> buffer & 1) ^ 1);
      staging_turns_ ^= 1u << buffer;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint32_t packed[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) packed[j] = Step::Finish(acc_, chunk * 16 + c * 4 + j);
        // 128-byte swizzle: the 16-byte column index is xor-ed with the row.
        ptx::StoreMatrix(base + ((c * 32 + lane / 16 * 16) ^ (row % 8 * 16)), packed);
      }
      ptx::FenceAsyncShared();
      __syncwarp();
      if (IsLane0()) ptx::BarrierArrive(AddressOf(shared_.staging_full[consumer_], buffer));
    }
  }

  SharedMemory& shared_;
  const Params& p_;
  const int consumer_;
  RingPosition<kNumStages> stage_;
  uint32_t staging_turns_ = 0;  // a parity bit for each staging buffer
  bool came_ = true;            // whatever was waited for
  float acc_[128];
};

}  // namespace megamoe
