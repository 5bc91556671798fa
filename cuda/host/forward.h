// One call of the forward: workspace layout, tensor maps, launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "host/layer.h"
#include "shared/cuda_status.h"

namespace megamoe {

struct ForwardCall : LayerCall {
  const void* x;       // [T, H] bf16
  const void* w_gate;  // [E, H, I] bf16
  const void* w_up;    // [E, H, I] bf16
  const void* w_down;  // [E, I, H] bf16
  void* y;             // [T, H] bf16
  void* pool;          // [P, H] bf16
  void* h;             // [P, I] bf16
  void* gate_up;       // [P, 2 I] bf16, of the first pass, for the backward; null: not kept
};

int64_t NumForwardCounters(int64_t pool_rows);

// Enqueues the plan and the launches of the kernel. Allocates nothing and does not wait.
CudaStatus RunForward(cudaStream_t stream, const ForwardCall& call);

}  // namespace megamoe
