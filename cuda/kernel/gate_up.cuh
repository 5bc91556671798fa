// g and u on their way from the product that makes them to the arithmetic that needs them, rounded
// to bf16: how they lie in memory.
//
// They lie in parts of 64 pool rows x 64 columns. Of every thread of a consumer a part holds the
// words that a product leaves it, in vectors of 16 bytes, and the same vector of a warp lies in
// whole lines. So a product's threads store them without shared memory and without a barrier, and
// the finish of another product, in which the thread with the same index needs them, gets a part by
// one copy into a stage.
#pragma once

#include <cstdint>

#include "kernel/steps.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "shared/backward.h"
#include "shared/layer.h"

namespace megamoe {

constexpr int kPartColumns = 64;
constexpr int kPartVectors = 4;  // of a thread, of g; and as many of u
static_assert(kPartVectors * kVector * kGroupThreads == kConsumerRows * kPartColumns);
// In a stage, g before u, the first consumer's before the second's.
constexpr uint32_t kPartBytes = 2 * ptx::kChunkBytes;
static_assert(kNumConsumers * kPartBytes <= kStageBytes);

// Of the two rows of a thread, 8 apart: all bits, or none in a pad.
struct RowBits {
  uint32_t of[2];

  static __device__ __forceinline__ RowBits Of(const LayerParams& p, const TileItem& item,
                                               int consumer) {
    const int32_t* slots = p.plan.row_slot + item.row + consumer * kConsumerRows + ThreadRow();
    return {{slots[0] >= 0 ? ~0u : 0u, slots[8] >= 0 ? ~0u : 0u}};
  }
};

// Eight sums of a thread. Pads are 0, whatever the sums hold there: then what is stored depends on
// the arguments alone.
__device__ __forceinline__ uint4 PackSums(const float* s, const RowBits& rows) {
  return {ptx::PackBf16(s[0], s[1]) & rows.of[0], ptx::PackBf16(s[2], s[3]) & rows.of[1],
          ptx::PackBf16(s[4], s[5]) & rows.of[0], ptx::PackBf16(s[6], s[7]) & rows.of[1]};
}

// The array that the forward keeps for the backward, [P, 2 I]: each part is 16 KB in one piece.
struct KeptGateUp {
  static constexpr bool kIsMadeHere = false;

  // rows, columns: which 64 of the pool.
  template <typename Vector>
  static __device__ __forceinline__ Vector* Part(Vector* gate_up, const LayerParams& p, int rows,
                                                 int columns) {
    const int64_t part = int64_t{rows} * (p.I / kPartColumns) + columns;
    return gate_up + part * (kPartBytes / sizeof(uint4));
  }
  static __device__ __forceinline__ void Store(uint4* part, int v, uint4 g, uint4 u) {
    uint4* const to = part + v * kGroupThreads + threadIdx.x % kGroupThreads;
    ptx::StoreStreaming(to, g);
    ptx::StoreStreaming(to + kPartVectors * kGroupThreads, u);
  }

  static __device__ __forceinline__ void Load(const BackwardMaps&, const BackwardParams& p,
                                              int rows, int columns, uint32_t to,
                                              uint32_t barrier) {
    ptx::BulkLoad(to, Part(p.gate_up, p, rows, columns), kPartBytes, barrier);
  }
  // Where the thread's first vector of g lies in a part in shared memory.
  static __device__ __forceinline__ uint32_t ThreadBytes(uint32_t thread) {
    return thread % kGroupThreads * sizeof(uint4);
  }
};

// Two arrays [P, I], dg and du, in which g and u lie until the item that made them replaces them: a
// part is 128 bytes of 64 rows of each.
struct OwnGateUp {
  static constexpr bool kIsMadeHere = true;
  static constexpr int kRowThreads = kPartColumns / kVector;  // of a part

  static __device__ __forceinline__ void Store(const BackwardParams& p, int rows, int columns,
                                               int v, uint4 g, uint4 u) {
    const int thread = threadIdx.x % kGroupThreads;
    const int row = rows * kConsumerRows + (v * kGroupThreads + thread) / kRowThreads;
    const int64_t at =
        int64_t{row} * (p.I / kVector) + columns * kRowThreads + thread % kRowThreads;
    p.dg[at] = g;
    p.du[at] = u;
  }

  static __device__ __forceinline__ void Load(const BackwardMaps& maps, const BackwardParams&,
                                              int rows, int columns, uint32_t to,
                                              uint32_t barrier) {
    const int column = columns * kPartColumns;
    const int row = rows * kConsumerRows;
    ptx::TmaLoad(to, maps.dg, barrier, column, row, ptx::kEvictNormal);
    ptx::TmaLoad(to + ptx::kChunkBytes, maps.du, barrier, column, row, ptx::kEvictNormal);
  }
  static __device__ __forceinline__ uint32_t ThreadBytes(uint32_t thread) {
    const uint32_t row = thread % kGroupThreads / kRowThreads;
    return row * 128 + (thread % kRowThreads ^ row % 8) * sizeof(uint4);
  }
};

// Bytes from one vector of a thread to its next, in either.
constexpr uint32_t kPartVectorBytes = kGroupThreads * sizeof(uint4);

// The g and u of an item's own tile, 64 columns at a time: not multiplied, but loaded into a stage
// each, behind those of dh, for the finish.
template <typename Source>
struct GateUpParts : Source {
  static constexpr bool kIsMultiplied = false;
  static constexpr int kParts = kDgradDownColumns / kPartColumns;

  static __device__ __forceinline__ int NumKBlocks(const BackwardParams&, const TileItem&) {
    return kParts;
  }
  // False behind the last column.
  static __device__ __forceinline__ bool Exists(const BackwardParams& p, const TileItem& item,
                                                int part) {
    return (item.n * kParts + part) * kPartColumns < p.I;
  }
  static __device__ __forceinline__ uint32_t NumBytes(const BackwardParams& p, const TileItem& item,
                                                      int part) {
    return Exists(p, item, part) ? item.num_consumers * kPartBytes : 0;
  }
  static __device__ __forceinline__ void Load(const BackwardMaps& maps, const BackwardParams& p,
                                              const TileItem& item, int part, uint32_t stage,
                                              uint32_t barrier) {
    if (!Exists(p, item, part)) return;
    for (int consumer = 0; consumer < item.num_consumers; ++consumer) {
      Source::Load(maps, p, item.row / kConsumerRows + consumer, item.n * kParts + part,
                   stage + consumer * kPartBytes, barrier);
    }
  }
};

}  // namespace megamoe
