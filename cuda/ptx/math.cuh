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

// Two e4m3fn codes, rounded to nearest even; the first value in the low byte. What is beyond 448
// becomes 448, NaN a NaN.
__device__ __forceinline__ uint16_t PackE4m3(float low, float high) {
  uint16_t packed;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
  return packed;
}
// With zeros of their sign for factors and products below the normal numbers.
__device__ __forceinline__ float MultiplyFlushed(float x, float y) {
  float product;
  asm("mul.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

// NaN if either is.
__device__ __forceinline__ float MinOrNan(float x, float y) {
  float least;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(x), "f"(y));
  return least;
}
__device__ __forceinline__ float MaxOrNan(float x, float y) {
  float most;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(x), "f"(y));
  return most;
}

// Within 2 units of the last place; what is below the normal numbers becomes 0.
__device__ __forceinline__ float Exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}
// Within 1 unit of the last place; 0 for infinity.
__device__ __forceinline__ float Reciprocal(float x) {
  float reciprocal;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(reciprocal) : "f"(x));
  return reciprocal;
}

}  // namespace megamoe::ptx
