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
// Of e4m3fn: the value of a code, and the code of a value, rounded to the nearest, ties to even.
inline float FromE4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  if ((code & 0x7f) == 0x7f) return NAN;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}
inline uint8_t ToE4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (std::isnan(value)) return 0x7f;
  const float magnitude = std::fabs(value);
  if (magnitude >= 448) return sign | 0x7e;
  // In units of the least of the binade's codes; those of subnormal ones are those of the first.
  const int exponent = magnitude < 0x1p-6f ? -6 : std::ilogb(magnitude);
  const int units = static_cast<int>(std::nearbyint(std::ldexp(magnitude, 3 - exponent)));
  return static_cast<uint8_t>(sign | (((exponent + 6) << 3) + units));
}
inline uint16_t PackE4m3(float low, float high) {
  return static_cast<uint16_t>(ToE4m3(low) | ToE4m3(high) << 8);
}
inline float Flushed(float value) {
  return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value;
}
inline float MultiplyFlushed(float x, float y) { return Flushed(Flushed(x) * Flushed(y)); }
inline float MinOrNan(float x, float y) { return x < y || std::isnan(x) ? x : y; }
inline float MaxOrNan(float x, float y) { return x > y || std::isnan(x) ? x : y; }
inline float Exp2(float x) { return std::exp2(x); }
inline float Reciprocal(float x) { return 1 / x; }

}  // namespace megamoe::ptx
