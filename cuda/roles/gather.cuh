// Gather: brings the tokens of a tile's rows into the stages, as the A operand.
//
// reads      row_slot of the plan; x
// writes     A of the stages, in the swizzled layout that a tensor copy would give
// waits on   item_full, stage_empty
// signals    item_empty, stage_full
// threads    one warp; a lane copies 16 bytes of every fourth row
//
// Tokens are read where they lie: an expert-contiguous copy of x would be written once and read
// again for each column tile, K times the bytes of x.
#pragma once

#include "pipeline/shared_memory.cuh"
#include "ptx/tma.cuh"

namespace megamoe {

template <typename Steps>
class GatherRole {
  using Params = typename Steps::Params;

 public:
  __device__ GatherRole(SharedMemory& shared, const Params& params)
      : shared_(shared), p_(params), lane_(threadIdx.x % kWarpThreads) {}

  __device__ void Run() {
    ForEachItem(shared_, [&](const TileItem& item) {
      Steps::With(item.step, [&]<typename Step>() {
        const int num_k_blocks = Step::NumKBlocks(p_);
        if constexpr (Step::kGathersRows) {
          GatherItem(item, num_k_blocks);
        } else {
          for (int k = 0; k < num_k_blocks; ++k) stage_.Advance();
        }
      });
    });
  }

 private:
  static constexpr unsigned kAllLanes = 0xffffffffu;
  static constexpr int kRowVectors = kBlockK * 2 / 16;           // of a row in a stage
  static constexpr int kRowsAtOnce = kWarpThreads / kRowVectors;  // of one copy of the warp
  static constexpr int kCopies = kTileRows / kRowsAtOnce;
  static constexpr int kSlotsOfLane = kTileRows / kWarpThreads;
  static constexpr uint32_t kPad = ~0u;

  // Where in x, in 16-byte vectors, the token of row `kRowsAtOnce i + lane / kRowVectors` begins;
  // kPad for a pad.
  __device__ __forceinline__ void ReadOffsets(int first_row) {
    uint32_t offsets[kSlotsOfLane];
#pragma unroll
    for (int i = 0; i < kSlotsOfLane; ++i) {
      const int slot = p_.plan.row_slot[first_row + i * kWarpThreads + lane_];
      offsets[i] = slot < 0 ? kPad : slot / p_.dims.K * (p_.H / 8);
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * kRowsAtOnce + lane_ / kRowVectors;
      offsets_[i] = __shfl_sync(kAllLanes, offsets[i * kRowsAtOnce / kWarpThreads],
                                row % kWarpThreads);
    }
  }

  __device__ __forceinline__ void GatherItem(const TileItem& item, int num_k_blocks) {
    ReadOffsets(item.row);
    const uint4* x = p_.x + lane_ % kRowVectors;
    // Of the rows with an even number of copies before; 4 rows on, the swizzle flips one bit.
    const uint32_t in_stage = lane_ / kRowVectors * 128 + (lane_ % kRowVectors ^ lane_ / kRowVectors) * 16;
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      ptx::BarrierWait(AddressOf(shared_.stage_empty, stage_.index), stage_.parity ^ 1);
      const uint32_t stage = AddressOf(shared_.stages, stage_.index);
      ptx::KeepInPlace(x);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const uint32_t to = stage + (in_stage ^ i % 2 * 64) + i * kRowsAtOnce * 128;
        ptx::KeepInPlace(offsets_[i]);  // or the loop would carry a pointer and a size for each
        const bool is_row = offsets_[i] != kPad;
        ptx::CopyAsync(to, is_row ? x + offsets_[i] : x, is_row);
      }
      ptx::CopyCommit();
      x += kRowVectors;
      if (k > 0) Publish<1>();
      unpublished_ = AddressOf(shared_.stage_full, stage_.index);
      stage_.Advance();
    }
    Publish<0>();
  }

  // Announces the stage before the last kPending ones. The products read it through the
  // asynchronous proxy.
  template <int kPending>
  __device__ __forceinline__ void Publish() {
    ptx::CopyWait<kPending>();
    ptx::FenceAsyncShared();
    __syncwarp();
    if (lane_ == 0) ptx::BarrierArrive(unpublished_);
  }

  SharedMemory& shared_;
  const Params& p_;
  const int lane_;
  RingPosition<kNumStages> stage_;
  uint32_t unpublished_ = 0;
  uint32_t offsets_[kCopies];
};

}  // namespace megamoe
