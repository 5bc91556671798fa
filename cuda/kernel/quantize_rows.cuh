// Rows of bf16 as FP8 codes with their scales.
//
// reads      x
// writes     codes and scales of every row, as shared/fp8.h has them
// threads    any blocks; eight lanes have a group, 16 columns each: of 512 columns a warp reads and
//            writes whole lines
#pragma once

#include <cstdint>

#include "kernel/fp8_scale.cuh"
#include "ptx/math.cuh"
#include "ptx/sync.cuh"
#include "shared/fp8.h"

namespace megamoe {

constexpr int kQuantizeThreads = 384;
constexpr int kQuantizedColumns = 16;  // of a thread

// Of sixteen values the largest magnitude, NaN if one is.
__device__ __forceinline__ float LargestOf(const float (&values)[kQuantizedColumns]) {
  float largest = 0;
#pragma unroll
  for (const float value : values) largest = ptx::MaxOrNan(largest, fabsf(value));
  return largest;
}

__device__ inline void QuantizeRows(const QuantizeParams& p) {
  constexpr int kGroupLanes = kFp8Group / kQuantizedColumns;
  constexpr int kWords = kQuantizedColumns / 2;
  constexpr uint32_t kBlockGroups = kQuantizeThreads / kGroupLanes;
  const uint32_t groups_of_row = p.D / kFp8Group;
  const uint32_t num_groups = p.num_rows * groups_of_row;  // no device holds 2^32 of them
  const uint32_t lane = threadIdx.x % kGroupLanes;
  const uint32_t step = gridDim.x * kBlockGroups;
  uint32_t group = blockIdx.x * kBlockGroups + threadIdx.x / kGroupLanes;
  // All lanes of a warp go on together: they exchange values.
  for (; __any_sync(kAllLanes, group < num_groups); group += step) {
    const bool is_group = group < num_groups;
    const uint32_t row = group / groups_of_row;
    const uint32_t of_row = group % groups_of_row;
    uint32_t words[kWords] = {};
    if (is_group) {
      const uint4* const from = p.x + uint64_t{group} * (kFp8Group / 8) + lane * 2;
      const uint4 low = from[0], high = from[1];
      const uint32_t loaded[kWords] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < kWords; ++i) words[i] = loaded[i];
    }
    float values[kQuantizedColumns];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      values[2 * i] = ptx::LowBf16(words[i]);
      values[2 * i + 1] = ptx::HighBf16(words[i]);
    }
    float largest = LargestOf(values);
#pragma unroll
    for (int mask = 1; mask < kGroupLanes; mask *= 2) {
      largest = ptx::MaxOrNan(largest, __shfl_xor_sync(kAllLanes, largest, mask));
    }
    const Fp8Scale scale = Fp8Scale::Of(largest);
    uint32_t codes[kQuantizedColumns / 4];
#pragma unroll
    for (int i = 0; i < kQuantizedColumns / 4; ++i) {
      const float* const v = values + 4 * i;
      const uint32_t first = ptx::PackE4m3(scale.Scaled(v[0]), scale.Scaled(v[1]));
      const uint32_t second = ptx::PackE4m3(scale.Scaled(v[2]), scale.Scaled(v[3]));
      codes[i] = first | second << 16;
    }
    if (!is_group) continue;
    uint8_t* const to = p.codes + uint64_t{row} * CodeRowBytes(p.D);
    reinterpret_cast<uint4*>(to)[of_row * kGroupLanes + lane] = {codes[0], codes[1], codes[2],
                                                                 codes[3]};
    if (lane == 0) reinterpret_cast<float*>(to + p.D)[of_row] = scale.scale;
  }
}

}  // namespace megamoe
