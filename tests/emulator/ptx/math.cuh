// As cuda/ptx/math.cuh, for the emulated machine.
#pragma once

#include "machine.h"

namespace megamoe::ptx {

inline uint32_t RoundedBf16(float value) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, value);
  if (std::isnan(value)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline uint32_t PackBf16(float low, float high) {
  return RoundedBf16(low) | RoundedBf16(high) << 16;
}
inline float LowBf16(uint32_t packed) { return __uint_as_float(packed << 16); }
inline float HighBf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }
inline float MinOrNan(float x, float y) { return x < y || std::isnan(x) ? x : y; }
inline float MaxOrNan(float x, float y) { return x > y || std::isnan(x) ? x : y; }
inline float Exp2(float x) { return std::exp2(x); }
inline float Reciprocal(float x) { return 1 / x; }

}  // namespace megamoe::ptx
