// One call of the backward with precision="fp8_block".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/backward.h"
#include "shared/cuda_status.h"

namespace megamoe {

// A matrix of each expert, M x N, as the backward takes it.
struct BackwardMatrix {
  const void* natural;     // [E/R, M, N] e4m3fn
  const void* transposed;  // [E/R, N, M], the same codes; of w_down null
  const float* scales;     // [E/R, M / 128, N / 128]
};

// Of BackwardCall the weights are null, and neither biases nor another activation than SwiGLU are
// taken.
struct Fp8BackwardCall : BackwardCall {
  BackwardMatrix gate;  // H x I
  BackwardMatrix up;    // H x I
  BackwardMatrix down;  // I x H
  void* x_codes;        // [T] rows of H codes, see shared/fp8.h; null: see MakesGateUp
  void* dy_codes;       // [T] rows of H codes; with peers both are those of PeerArrays
  void* x_code_pool;    // [P] rows of H codes; null as x_codes
  void* dy_code_pool;   // [P] rows of H codes
  void* dz_codes;       // [P] rows of 2 I codes
};

// Whether a pass of the call computes g and u again: the forward has kept those of the first alone.
inline bool MakesGateUp(const BackwardCall& call) {
  return call.gate_up == nullptr || MaxPasses(call.plan) > 1;
}

// Enqueues the quantisation of x and dy, the plan and the launches of the kernel. Allocates nothing
// and does not wait.
CudaStatus RunFp8Backward(cudaStream_t stream, const Fp8BackwardCall& call);

}  // namespace megamoe
