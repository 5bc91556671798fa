// One call of the forward with precision="fp8_block".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/layer.h"
#include "shared/cuda_status.h"

namespace megamoe {

// A matrix of each expert, M x N, as the forward takes it.
struct QuantizedMatrix {
  const void* codes;    // [E/R, N, M] e4m3fn: transposed, so that products sum along rows
  const float* scales;  // [E/R, M / 128, N / 128]
};

struct Fp8ForwardCall : LayerCall {
  const void* x;           // [T, H] bf16
  QuantizedMatrix w_gate;  // H x I
  QuantizedMatrix w_up;    // H x I
  QuantizedMatrix w_down;  // I x H
  void* y;                 // [T, H] bf16
  void* x_codes;           // [T] rows of H codes, see shared/fp8.h; with peers those of PeerArrays
  void* x_pool;            // [P] rows of H codes
  void* h;                 // [P] rows of I codes
  void* o;                 // [P, H] bf16
  void* gate_up;           // as ForwardCall has it
};

// Enqueues the quantisation of x, the plan and the launches of the kernel. Allocates nothing and
// does not wait.
CudaStatus RunFp8Forward(cudaStream_t stream, const Fp8ForwardCall& call);

}  // namespace megamoe
