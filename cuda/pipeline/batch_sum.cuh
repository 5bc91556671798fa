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

// A lane sums two vectors of columns at a time, kVectorStride apart.
constexpr int kSumVectors = 2;
constexpr int kVectorStride = kWarpThreads * kVector;
constexpr int kSumColumns = kSumVectors * kVectorStride;

// Batch::Route::next: the level of the tree at which the next row joins this one, 0 in the same
// block; or that there is none.
enum NextRow : uint32_t { kNoRow = kTreeLevels + 1, kNoRowAddZero };

struct BatchSum {
  float v[kSumVectors][kVector];

  __device__ __forceinline__ void Add(const BatchSum& other) {
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) v[i][j] += other.v[i][j];
    }
  }
  // Adds a product, or begins with it: with a product that is added to +0.
  template <bool kBegins>
  __device__ __forceinline__ void AddScaled(float scale, int i, uint4 row) {
    const uint32_t words[4] = {row.x, row.y, row.z, row.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& low = v[i][2 * j];
      float& high = v[i][2 * j + 1];
      low = Kept(fmaf(scale, ptx::LowBf16(words[j]), kBegins ? 0.0f : low));
      high = Kept(fmaf(scale, ptx::HighBf16(words[j]), kBegins ? 0.0f : high));
    }
  }
  static __device__ __forceinline__ float Kept(float sum) {
    return HasFault(SeededFault::kTokensInBf16) ? ptx::LowBf16(ptx::PackBf16(sum, 0)) : sum;
  }
  __device__ __forceinline__ void AddZero() {
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) v[i][j] += 0.0f;
    }
  }
  // Four of the sums as they are.
  __device__ __forceinline__ uint4 Word(int i, int half) const {
    const float* four = v[i] + 4 * half;
    return {__float_as_uint(four[0]), __float_as_uint(four[1]), __float_as_uint(four[2]),
            __float_as_uint(four[3])};
  }
  __device__ __forceinline__ uint4 Packed(int i) const {
    return {ptx::PackBf16(v[i][0], v[i][1]), ptx::PackBf16(v[i][2], v[i][3]),
            ptx::PackBf16(v[i][4], v[i][5]), ptx::PackBf16(v[i][6], v[i][7])};
  }
};

// Walks the rows of a batch.
struct BatchRows {
  uint32_t address;  // of the lane's first vector in the next row
  const Batch::Route* route;
  const uint32_t row_bytes;
  uint32_t next = 0;  // of the last row taken

  template <bool kBegins>
  __device__ __forceinline__ void Take(BatchSum& sum) {
    const Batch::Route taken = *route;
    uint4 vectors[kSumVectors];
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      vectors[i] = ptx::LoadShared(address + i * kVectorStride * 2);
    }
#pragma unroll
    for (int i = 0; i < kSumVectors; ++i) {
      sum.template AddScaled<kBegins>(taken.weight, i, vectors[i]);
    }
    next = taken.next;
    ++route;
    address += row_bytes;
  }
};

// The sum of the node of the tree that holds the next row, kLevel levels above the blocks.
template <int kLevel>
__device__ __forceinline__ BatchSum SumOfNode(BatchRows& rows) {
  BatchSum sum;
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
