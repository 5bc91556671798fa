// The scale of a group of values that become FP8 codes.
#pragma once

#include <cstdint>

#include "ptx/math.cuh"
#include "ptx/sync.cuh"

namespace megamoe {

// A power of two, and what brings the values of the group to codes.
struct Fp8Scale {
  float scale;
  float inverse;  // NaN in a group that is not finite, all of whose codes are NaN

  // largest: the largest magnitude of the group, NaN if a value is. The scale is the smallest power
  // of two with which that is at most 448 = 1.75 2^8, but at least 2^-117, so that each code times
  // it is a normal number; 1 for a group without a normal number, whose codes are 0, and for one
  // that is not finite.
  static __device__ __forceinline__ Fp8Scale Of(float largest) {
    constexpr uint32_t kAbove1_75 = 0x7fffff - 0x600000;  // carries if a mantissa is more
    constexpr uint32_t kBias = 127, kMost = 8, kLeast = kBias - 117;
    constexpr uint32_t kNormal = 0x00800000, kInfinite = 0x7f800000;
    const uint32_t bits = __float_as_uint(largest);
    const bool is_finite = bits < kInfinite;
    uint32_t exponent = max((bits + kAbove1_75) >> 23, kMost + kLeast) - kMost;
    if (bits < kNormal || !is_finite) exponent = kBias;
    const float inverse = __uint_as_float((2 * kBias - exponent) << 23);
    return {__uint_as_float(exponent << 23), is_finite ? inverse : __uint_as_float(~0u >> 1)};
  }

  // What becomes the code, of a value of the group.
  __device__ __forceinline__ float Scaled(float value) const {
    return ptx::MultiplyFlushed(value, inverse);
  }
};

// The largest magnitude over the four lanes of a row, as a product leaves it.
__device__ __forceinline__ float LargestOfRow(float largest) {
  largest = ptx::MaxOrNan(largest, __shfl_xor_sync(kAllLanes, largest, 1));
  return ptx::MaxOrNan(largest, __shfl_xor_sync(kAllLanes, largest, 2));
}

}  // namespace megamoe
