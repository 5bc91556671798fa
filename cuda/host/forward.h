// One call of the forward: workspace layout, tensor maps, launches.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/fault.h"
#include "shared/plan.h"
#include "shared/trace.h"

namespace megamoe {

// Device pointers of one call; shapes as in the dimension key, P = pool_rows.
struct ForwardCall {
  PlanProblem plan;
  PlanArrays plan_arrays;
  int H;
  int I;
  int num_blocks;  // B of the summation tree
  int64_t pool_rows;
  const void* x;               // [T, H] bf16
  const int32_t* expert_idx;   // [T, K]
  const float* expert_weight;  // [T, K]
  const void* w_gate;          // [E, H, I] bf16
  const void* w_up;            // [E, H, I] bf16
  const void* w_down;          // [E, I, H] bf16
  void* y;                     // [T, H] bf16
  void* pool;                  // [P, H] bf16
  void* h;                     // [P, I] bf16
  uint32_t* counters;          // [NumForwardCounters(P)]
  WaitContext wait;            // of all launches
  TraceBuffer trace;           // of all launches
};

int64_t NumForwardCounters(int64_t pool_rows);

// Enqueues the plan and one launch of the kernel for each of `launches`, a mask of parts
// (shared/forward.h). Allocates nothing and does not wait.
CudaStatus RunForward(cudaStream_t stream, const ForwardCall& call, const int64_t* launches,
                      int64_t num_launches);

}  // namespace megamoe
