// The activation functions and what their gradients are made of.
//
// All come from an exponential, so that they are as precise for negative x as for positive:
// tanh.approx, 1.5 % faster in the whole forward, has lost two digits at -4, where 1 + tanh(x/2)
// cancels. The forward does little else with an element, and two instructions of the slow unit
// would bound it: its reciprocal is a polynomial. The backward is bound by the number of
// instructions, and a reciprocal saves it five.
#pragma once

#include "ptx/math.cuh"

namespace megamoe::ptx {

constexpr float kLog2E = 1.44269504f;

__device__ __forceinline__ float ExpOfMinusAbs(float x) { return Exp2(-kLog2E * fabsf(x)); }

// 1 / (1 + t) for t in [0, 1]: 1 at 0 exactly, else within 3.6e-4, a fifth of half a bf16 step;
// minimax of degree 4.
__device__ __forceinline__ float ReciprocalOfOnePlus(float t) {
  float p = fmaf(0.1604386f, t, -0.5514736f);
  p = fmaf(p, t, 0.8800154f);
  p = fmaf(p, t, -0.9888031f);
  return fmaf(p, t, 1.0f);
}

// x sigmoid(z).
__device__ __forceinline__ float TimesSigmoid(float x, float z) {
  const float t = ExpOfMinusAbs(z);
  return (z < 0 ? x * t : x) * ReciprocalOfOnePlus(t);
}
__device__ __forceinline__ float Silu(float x) { return TimesSigmoid(x, x); }

// x sigmoid(x) and its derivative, sigmoid(x) + x sigmoid(x) sigmoid(-x).
struct ValueAndSlope {
  float value, slope;
};
__device__ __forceinline__ ValueAndSlope SiluWithSlope(float x) {
  const float sigmoid = Reciprocal(1 + Exp2(-kLog2E * x));
  const float silu = x * sigmoid;
  return {silu, fmaf(silu, 1 - sigmoid, sigmoid)};
}

// x sigmoid(alpha x + beta x^3), beta not negative. What overflows in it is no factor of 0.
__device__ __forceinline__ float Swish(float x, float alpha, float beta) {
  return TimesSigmoid(x, x * fmaf(beta * x, x, alpha));
}
// And its derivative, sigmoid(z) + x z' sigmoid(z) sigmoid(-z).
__device__ __forceinline__ ValueAndSlope SwishWithSlope(float x, float alpha, float beta) {
  const float cubic = beta * x;
  const float sigmoid = Reciprocal(1 + Exp2(-kLog2E * x * fmaf(cubic, x, alpha)));
  const float swish = x * sigmoid;
  const float slope = fminf(fmaf(3 * cubic, x, alpha), 0x1p100f);
  return {swish, fmaf(swish * (1 - sigmoid), slope, sigmoid)};
}

}  // namespace megamoe::ptx
