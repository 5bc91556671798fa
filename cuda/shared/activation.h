// The gated activation of a call and the biases of its experts, as the kernels take them.
#pragma once

#include <limits>

namespace megamoe {

// h = a(min(g, limit)) (clip(u, -limit, limit) + offset) with a(g) = g sigmoid(alpha g + beta g^3).
struct GatedUnit {
  float alpha = 1;
  float beta = 0;
  float limit = std::numeric_limits<float>::infinity();
  float offset = 0;
};

// Of the experts of a rank, float32; all of them or none.
struct ExpertBiases {
  const float* gate;  // [E/R, I]
  const float* up;    // [E/R, I]
  const float* down;  // [E/R, H]
};

// Their gradients, which the backward writes with those of the weights.
struct BiasGradients {
  float* gate;
  float* up;
  float* down;
};

// Whether it takes the kernels of any activation and biases. Those of SwiGLU alone, h = silu(g) u,
// spare what they do not need.
inline bool IsGeneral(const GatedUnit& unit, const ExpertBiases& biases) {
  const GatedUnit swiglu;
  const bool is_swiglu = unit.alpha == swiglu.alpha && unit.beta == swiglu.beta &&
                         unit.limit == swiglu.limit && unit.offset == swiglu.offset;
  return !is_swiglu || biases.gate != nullptr;
}

}  // namespace megamoe
