// Host entry of the plan kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "shared/cuda_status.h"
#include "shared/fault.h"
#include "shared/plan.h"

namespace megamoe::plan {

// Loads the kernels on the current device: nothing is loaded later, when a peer may be waiting.
CudaStatus Load();

// Words that the plan clears on the side: the counters of the kernel that follows it.
struct Cleared {
  uint32_t* words;
  int64_t count;
};

// Enqueues the plan of a pass of `problem` for expert_idx, int32 [R, T, K] on the device. Allocates
// nothing and does not wait. The first pass relies on no content of the output arrays. The others
// follow it in order, on the same arrays; one that the routing does not need, or that belongs to a
// call that has failed, leaves all as it is, but for totals[2] of the latter, which becomes 0. The
// next kernel of the stream may begin before this ends (ptx::WaitForPreviousKernel).
//
// wait: of a call that has waited for the routes of its peers, else {}. If they did not come, they
// still may, between one kernel of the plan and the next: it then is that of no routes.
CudaStatus Launch(cudaStream_t stream, const PlanProblem& problem, int pass,
                  const int32_t* expert_idx, const PlanArrays& arrays, const Cleared& cleared,
                  const WaitContext& wait);

}  // namespace megamoe::plan
