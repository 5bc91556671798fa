// Element-wise arithmetic: float32 in registers, bf16 in memory.
#pragma once

#include <cstdint>

namespace megamoe::ptx {

// Rounded to nearest; the first value in the low half. As uint32_t, because ptxas splits packed
// bf16 types into 16-bit registers.
__device__ __forceinline__ uint32_t PackBf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ __forceinline__ float LowBf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float HighBf16(uint32_t packed) {
  return __uint_as_float(packed & 0xffff0000u);
}

// tanh.approx has a relative error of 2^-11.
__device__ __forceinline__ float Tanh(float x) {
  float tanh;
  asm("tanh.approx.f32 %0, %1;" : "=f"(tanh) : "f"(x));
  return tanh;
}

}  // namespace megamoe::ptx
