// One call of the backward: workspace layout, tensor maps, launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/layer.h"
#include "shared/backward.h"
#include "shared/cuda_status.h"

namespace megamoe {

struct BackwardCall : LayerCall {
  const void* dy;       // [T, H] bf16
  const void* x;        // [T, H] bf16
  const void* w_gate;   // [E, H, I] bf16
  const void* w_up;     // [E, H, I] bf16
  const void* w_down;   // [E, I, H] bf16
  const void* gate_up;  // [P, 2 I] bf16, of the first pass of the forward; null: not kept
  void* dx;             // [T, H] bf16
  float* dw;            // [T, K]
  // The gradients of the weights, of their shapes; null when the plan has no steps for them.
  bool float_gradients;  // float32, not bf16; where there may be several passes, always
  void* dw_gate;
  void* dw_up;
  void* dw_down;
  BiasGradients dbiases;  // with biases and weight gradients, else null
  void* x_pool;           // [P, H] bf16
  void* dy_pool;          // [P, H] bf16
  void* dg;               // [P, I] bf16
  void* du;               // [P, I] bf16
  void* wh;               // [P, I] bf16
  void* dx_pool;          // [P, H] bf16
  float* dw_partial;      // [P, ceil(I / kDgradDownColumns)]
  float2* bias_rows;      // [P], with biases, else null
};

int64_t NumBackwardCounters(int64_t pool_rows, int64_t experts);

// What the kernels of every precision take alike: the maps of the pools and of the gradients, but
// not those of the weights; and the parameters, as ParamsOf.
CudaStatus MakeBackwardMaps(const BackwardCall& call, BackwardMaps* maps);
BackwardParams BackwardParamsOf(const BackwardCall& call);

// Enqueues the plan and the launches of the kernel. Allocates nothing and does not wait.
CudaStatus RunBackward(cudaStream_t stream, const BackwardCall& call);

}  // namespace megamoe
