// g and u that the forward keeps for the backward, rounded to bf16: how they lie in memory.
//
// For each 64 pool rows and each 64 columns, 16 KB: of every thread of a consumer the words that a
// product of them leaves it, first those of g, in vectors of 16 bytes; the same vector of all
// threads lies together. So a warp moves 512 bytes at a time between registers and memory, and
// neither pass needs shared memory or a barrier for it.
#pragma once

#include <cstdint>

#include "kernel/steps.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "shared/layer.h"

namespace megamoe {

// Of the two rows of a thread, 8 apart: all bits, or none in a pad.
struct RowBits {
  uint32_t of[2];

  static __device__ __forceinline__ RowBits Of(const LayerParams& p, const TileItem& item,
                                               int consumer) {
    const int32_t* slots = p.plan.row_slot + item.row + consumer * kConsumerRows + ThreadRow();
    return {{slots[0] >= 0 ? ~0u : 0u, slots[8] >= 0 ? ~0u : 0u}};
  }
};

// The 64 rows of a consumer and one half of the columns of a tile of gate and up.
class GateUpPart {
 public:
  static constexpr int kHalves = 2;
  static constexpr int kVectors = 8;  // of a thread: half of g, half of u
  static constexpr int kHalfVectors = kVectors / 2;

  __device__ __forceinline__ GateUpPart(const LayerParams& p, const TileItem& item, int consumer,
                                        int half) {
    // Worked out here, not kept in registers through all items.
    uint32_t I = p.I;
    uint32_t thread = threadIdx.x % kGroupThreads;
    ptx::PinRegister(I);
    ptx::PinRegister(thread);
    const int num_columns = static_cast<int>(I) / kColumns;
    const int column = item.n * kHalves + half;
    const int rows = item.row / kConsumerRows + consumer;
    exists_ = column < num_columns;
    first_ = (int64_t{rows} * num_columns + column) * (kVectors * kGroupThreads) + thread;
  }
  // False for the second half of a tile that has only one.
  __device__ __forceinline__ bool exists() const { return exists_; }
  // Where vector v of the thread lies.
  __device__ __forceinline__ int64_t operator[](int v) const { return first_ + v * kGroupThreads; }

 private:
  static constexpr int kColumns = kGateUpColumns / kHalves;
  static_assert(kVectors * kGroupThreads * kVector == 2 * kConsumerRows * kColumns);

  bool exists_;
  int64_t first_;
};

// Keeps 64 sums of g and 64 of u a thread. Pads are 0, whatever the sums hold there: then what is
// kept depends on the arguments alone.
__device__ __forceinline__ void StoreGateUp(uint4* gate_up, const LayerParams& p,
                                            const TileItem& item, int consumer, const RowBits& rows,
                                            const float (&sums)[128]) {
#pragma unroll
  for (int half = 0; half < GateUpPart::kHalves; ++half) {
    const GateUpPart part(p, item, consumer, half);
    if (!part.exists()) break;
#pragma unroll
    for (int v = 0; v < GateUpPart::kVectors; ++v) {
      const int which = v / GateUpPart::kHalfVectors;  // g or u
      const float* s = sums + 64 * which + 32 * half + 8 * (v % GateUpPart::kHalfVectors);
      ptx::StoreStreaming(
          gate_up + part[v],
          {ptx::PackBf16(s[0], s[1]) & rows.of[0], ptx::PackBf16(s[2], s[3]) & rows.of[1],
           ptx::PackBf16(s[4], s[5]) & rows.of[0], ptx::PackBf16(s[6], s[7]) & rows.of[1]});
    }
  }
}

// The same where all 64 rows are pads.
__device__ __forceinline__ void StoreNoGateUp(uint4* gate_up, const LayerParams& p,
                                              const TileItem& item, int consumer) {
#pragma unroll
  for (int half = 0; half < GateUpPart::kHalves; ++half) {
    const GateUpPart part(p, item, consumer, half);
    if (!part.exists()) break;
#pragma unroll
    for (int v = 0; v < GateUpPart::kVectors; ++v) {
      ptx::StoreStreaming(gate_up + part[v], uint4{0, 0, 0, 0});
    }
  }
}

// words: 32 of g and 32 of u; 0 for columns that do not exist.
__device__ __forceinline__ void LoadGateUp(const uint4* gate_up, const LayerParams& p,
                                           const TileItem& item, int consumer,
                                           uint32_t (&words)[64]) {
#pragma unroll
  for (int half = 0; half < GateUpPart::kHalves; ++half) {
    const GateUpPart part(p, item, consumer, half);
#pragma unroll
    for (int v = 0; v < GateUpPart::kVectors; ++v) {
      const uint4 vector =
          part.exists() ? ptx::LoadStreaming(gate_up + part[v]) : uint4{0, 0, 0, 0};
      const int which = v / GateUpPart::kHalfVectors;
      uint32_t* w = words + 32 * which + 16 * half + 4 * (v % GateUpPart::kHalfVectors);
      w[0] = vector.x;
      w[1] = vector.y;
      w[2] = vector.z;
      w[3] = vector.w;
    }
  }
}

}  // namespace megamoe
