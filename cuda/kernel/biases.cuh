// The biases of the experts in the steps: added to sums, and what their gradients are made of.
//
// Those of a tile are few, and memory is far: the lanes of a warp load them before the products and
// hold two columns of each 64, which the others get by shuffles. What the backward sums over
// operands it reads from the stages, beside the products: they come to shared memory anyway, and
// the warps that multiply wait most of that time.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "kernel/steps.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"

namespace megamoe {

// Of the 256 columns of a product.
class TileBiases {
 public:
  // gate and up: of the expert; of 128 columns each.
  static __device__ __forceinline__ TileBiases OfGateUp(const ExpertBiases& biases,
                                                        const LayerParams& p, int expert, int n) {
    TileBiases tile;
    if (biases.gate == nullptr) return tile;
    tile.exist_ = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      tile.of_[i] = Load(biases.gate, p.I, expert, n * kGateUpColumns + i * 64);
      tile.of_[2 + i] = Load(biases.up, p.I, expert, n * kGateUpColumns + i * 64);
    }
    return tile;
  }
  static __device__ __forceinline__ TileBiases OfDown(const ExpertBiases& biases,
                                                      const LayerParams& p, int expert, int n) {
    TileBiases tile;
    if (biases.down == nullptr) return tile;
    tile.exist_ = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      tile.of_[i] = Load(biases.down, p.H, expert, n * kDownColumns + i * 64);
    }
    return tile;
  }

  __device__ __forceinline__ void AddTo(float (&acc)[128]) const {
#pragma unroll
    for (int chunk = 0; chunk < 4; ++chunk) {
#pragma unroll
      for (int c = 0; c < 4; ++c) AddTo(acc, chunk, c);
    }
  }
  // To sixteen columns of 64.
  __device__ __forceinline__ void AddTo(float (&acc)[128], int chunk, int c) const {
    if (!exist_) return;
#pragma unroll
    for (int block = 2 * c; block < 2 * c + 2; ++block) {
      const int lane = 4 * block + ThreadAnew() % 4;
      const float low = __shfl_sync(kAllLanes, of_[chunk].x, lane);
      const float high = __shfl_sync(kAllLanes, of_[chunk].y, lane);
      float* const sums = acc + 32 * chunk + 4 * block;
      sums[0] += low;
      sums[1] += high;
      sums[2] += low;
      sums[3] += high;
    }
  }

 private:
  // The lane's two of 64 columns; there is nothing behind the last one.
  static __device__ __forceinline__ float2 Load(const float* biases, int num_columns, int expert,
                                                int first) {
    if (first >= num_columns) return {0, 0};
    const float* from = biases + int64_t{expert} * num_columns + first;
    return __ldg(reinterpret_cast<const float2*>(from) + ThreadAnew() % kWarpThreads);
  }

  bool exist_ = false;
  float2 of_[4] = {};
};

// Of the two rows of a thread, the products with a vector: of its quarter of the columns.
struct RowDots {
  float of[2] = {0, 0};

  // Of the vector what the next 64 columns need.
  __device__ __forceinline__ void Load(const float* vector) {
    const float4* const from = reinterpret_cast<const float4*>(vector) + 4 * (ThreadAnew() % 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) next_[i] = __ldg(from + i);
  }
  // 64 columns. rows: the consumer's, of A in a stage.
  __device__ __forceinline__ void Add(uint32_t rows) {
    const uint32_t row = ThreadRow();
    const uint32_t quarter = ThreadAnew() % 4;
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const uint32_t at = rows + row * 128 + ((2 * quarter + i) ^ row % 8) * sizeof(uint4);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint4 a = ptx::LoadShared(at + r * 8 * 128);
        AddTo(of[r], a.x, a.y, next_[2 * i]);
        AddTo(of[r], a.z, a.w, next_[2 * i + 1]);
      }
    }
  }

 private:
  float4 next_[4];

  static __device__ __forceinline__ void AddTo(float& sum, uint32_t low, uint32_t high, float4 b) {
    sum = fmaf(ptx::LowBf16(low), b.x, sum);
    sum = fmaf(ptx::HighBf16(low), b.y, sum);
    sum = fmaf(ptx::LowBf16(high), b.z, sum);
    sum = fmaf(ptx::HighBf16(high), b.w, sum);
  }
};

// The sums of the columns of B over the rows of an expert, each row with a weight or not: of a
// consumer's 128 columns each warp has 32, of these each lane eight, of an eighth of the rows.
class ColumnSums {
 public:
  // Which row of eight is the lane's: eight lanes in turn have all banks.
  static __device__ __forceinline__ uint32_t LaneRow() {
    const uint32_t i = ThreadAnew() % kWarpThreads / 4;
    return i / 2 + i % 2 * 4;
  }
  // The first of the lane's columns, of the consumer's.
  static __device__ __forceinline__ uint32_t LaneColumn() {
    return ThreadAnew() % kGroupThreads / 4 / 8 * 32 + ThreadAnew() % 4 * 8;
  }

  // 64 rows. columns: the consumer's, of B in a stage. weights: of the lane's row of each eight.
  __device__ __forceinline__ void Add(uint32_t columns, const float (&weights)[kBlockK / 8]) {
    const uint32_t column = LaneColumn();
    const uint32_t at = columns + column / 64 * ptx::kChunkBytes + LaneRow() * 128 +
                        (column % 64 / kVector ^ LaneRow()) * sizeof(uint4);
#pragma unroll
    for (int i = 0; i < kBlockK / 8; ++i) {
      const uint4 v = ptx::LoadShared(at + i * 8 * 128);
      const float w = weights[i];
      const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        of_[2 * j] = fmaf(w, ptx::LowBf16(pairs[j]), of_[2 * j]);
        of_[2 * j + 1] = fmaf(w, ptx::HighBf16(pairs[j]), of_[2 * j + 1]);
      }
    }
  }

  // Writes the sums of the consumer's columns, the first num_columns of which exist; adds: to what
  // is there.
  __device__ __forceinline__ void Store(float* to, int num_columns, bool adds) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int mask = 4; mask < kWarpThreads; mask *= 2) {
        of_[j] += __shfl_xor_sync(kAllLanes, of_[j], mask);
      }
    }
    const int column = LaneColumn();
    if (ThreadAnew() % kWarpThreads >= 4 || column >= num_columns) return;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      to[column + j] = adds ? to[column + j] + of_[j] : of_[j];
    }
  }

 private:
  float of_[8] = {};
};

}  // namespace megamoe
