// The sum of a batch's rows by the contract's tree, of a few columns in each lane.
//
// A token's routes of one expert block are added in choice order, the blocks by a balanced binary
// tree. A product is fused into its sum (fmaf). A block without a route is +0 to the contract; it
// is skipped here, which changes no sum but -0: what would be -0 although it must not says
// kNoRowAddZero.
#pragma once

#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace megamoe {

// Batch::Route::next: the level of the tree at which the next row joins this one, 0 in the same
// block; or that there is none.
enum NextRow : uint32_t { kNoRow = kTreeLevels + 1, kNoRowAddZero };

// Of vectors of kColumns columns, side by side within a warp: what one of its instructions loads or
// stores lies together. A lane sums kLaneColumns at a time, those of a batch in turns of the warp.
template <int kColumns, int kLaneColumns>
struct BatchSum {
  static constexpr int kTurnColumns = kWarpThreads * kLaneColumns;
  static constexpr int kVectors = kLaneColumns / kColumns;
  static constexpr int kStride = kWarpThreads * kColumns;  // from one vector to the next
  struct Words {
    uint32_t v[kColumns / 2];  // two bf16 each
  };

  float v[kVectors][kColumns];

  // A vector of a row in shared memory.
  static __device__ __forceinline__ Words Load(uint32_t address) {
    if constexpr (kColumns == kVector) {
      const uint4 words = ptx::LoadShared(address);
      return {{words.x, words.y, words.z, words.w}};
    } else {
      const uint2 words = ptx::LoadShared8(address);
      return {{words.x, words.y}};
    }
  }
  __device__ __forceinline__ void Add(const BatchSum& other) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[i][j] += other.v[i][j];
    }
  }
  // Adds a product, or begins with it: with a product that is added to +0.
  template <bool kBegins>
  __device__ __forceinline__ void AddScaled(float scale, int i, const Words& row) {
#pragma unroll
    for (int j = 0; j < kColumns / 2; ++j) {
      float& low = v[i][2 * j];
      float& high = v[i][2 * j + 1];
      low = Kept(fmaf(scale, ptx::LowBf16(row.v[j]), kBegins ? 0.0f : low));
      high = Kept(fmaf(scale, ptx::HighBf16(row.v[j]), kBegins ? 0.0f : high));
    }
  }
  static __device__ __forceinline__ float Kept(float sum) {
    return HasFault(SeededFault::kTokensInBf16) ? ptx::LowBf16(ptx::PackBf16(sum, 0)) : sum;
  }
  __device__ __forceinline__ void AddZero() {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) v[i][j] += 0.0f;
    }
  }
  // A vector of the sums, as they are or rounded to bf16.
  __device__ __forceinline__ float4 Floats(int i) const {
    static_assert(kColumns == 4);
    return {v[i][0], v[i][1], v[i][2], v[i][3]};
  }
  __device__ __forceinline__ auto Packed(int i) const {
    const uint32_t first = ptx::PackBf16(v[i][0], v[i][1]);
    const uint32_t second = ptx::PackBf16(v[i][2], v[i][3]);
    if constexpr (kColumns == 4) {
      return uint2{first, second};
    } else {
      return uint4{first, second, ptx::PackBf16(v[i][4], v[i][5]), ptx::PackBf16(v[i][6], v[i][7])};
    }
  }
};

// Walks the rows of a batch.
template <typename Sum>
struct BatchRows {
  uint32_t address;  // of the lane's first vector in the next row
  const Batch::Route* route;
  const uint32_t row_bytes;
  uint32_t next = 0;  // of the last row taken

  template <bool kBegins>
  __device__ __forceinline__ void Take(Sum& sum) {
    const Batch::Route taken = *route;
    typename Sum::Words vectors[Sum::kVectors];
#pragma unroll
    for (int i = 0; i < Sum::kVectors; ++i) {
      vectors[i] = Sum::Load(address + i * Sum::kStride * 2);
    }
#pragma unroll
    for (int i = 0; i < Sum::kVectors; ++i) {
      sum.template AddScaled<kBegins>(taken.weight, i, vectors[i]);
    }
    next = taken.next;
    ++route;
    address += row_bytes;
  }
};

// The sum of the node of the tree that holds the next row, kLevel levels above the blocks.
template <int kLevel, typename Sum>
__device__ __forceinline__ Sum SumOfNode(BatchRows<Sum>& rows) {
  Sum sum;
  if constexpr (kLevel == 0) {
    rows.template Take<true>(sum);
#pragma unroll 1
    while (rows.next == 0) rows.template Take<false>(sum);
  } else {
    sum = SumOfNode<kLevel - 1>(rows);
    if (rows.next == kLevel) sum.Add(SumOfNode<kLevel - 1>(rows));
  }
  return sum;
}

}  // namespace megamoe
