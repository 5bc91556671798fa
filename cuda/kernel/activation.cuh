// The gated activations, as policies of the steps: h of g and u, and what its gradient is made of.
#pragma once

#include "pipeline/mutation.cuh"
#include "ptx/activation.cuh"
#include "ptx/math.cuh"
#include "shared/activation.h"

namespace megamoe {

// Of h = value factor, in which g makes the value and u the factor, its derivatives by both: 0
// where a limit holds.
struct Slopes {
  float value, factor;
  float slope;  // of the value
  bool g_passes = true;
  bool u_passes = true;

  __device__ __forceinline__ float h() const { return value * factor; }
  // What comes to g and u of dh.
  __device__ __forceinline__ float dg(float dh) const {
    return g_passes ? dh * (factor * slope) : 0;
  }
  __device__ __forceinline__ float du(float dh) const { return u_passes ? dh * value : 0; }
};

// h = silu(g) u, without biases.
struct SwiGlu {
  static constexpr bool kIsGeneral = false;

  static __device__ __forceinline__ float Value(const GatedUnit&, float g, float u) {
    return ptx::Silu(g) * u;
  }
  static __device__ __forceinline__ Slopes WithSlopes(const GatedUnit&, float g, float u) {
    auto [silu, slope] = ptx::SiluWithSlope(g);
    if (HasFault(SeededFault::kSlopeOfRelu)) slope = g > 0 ? 1 : 0;
    return {silu, u, slope};
  }
};

// Every GatedUnit, with biases where a call has some. NaN passes the limits.
struct GeneralUnit {
  static constexpr bool kIsGeneral = true;

  static __device__ __forceinline__ float Value(const GatedUnit& unit, float g, float u) {
    return ptx::Swish(Gate(unit, g), unit.alpha, unit.beta) * Factor(unit, u);
  }
  static __device__ __forceinline__ Slopes WithSlopes(const GatedUnit& unit, float g, float u) {
    const auto [swish, slope] = ptx::SwishWithSlope(Gate(unit, g), unit.alpha, unit.beta);
    return {swish, Factor(unit, u), slope, !(g > unit.limit), !(fabsf(u) > unit.limit)};
  }

 private:
  static __device__ __forceinline__ float Gate(const GatedUnit& unit, float g) {
    return ptx::MinOrNan(g, unit.limit);
  }
  static __device__ __forceinline__ float Factor(const GatedUnit& unit, float u) {
    return ptx::MaxOrNan(ptx::MinOrNan(u, unit.limit), -unit.limit) + unit.offset;
  }
};

}  // namespace megamoe
