// Host entry of the plan kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "shared/cuda_status.h"
#include "shared/plan.h"

namespace megamoe::plan {

// Loads the kernels on the current device: nothing is loaded later, when a peer may be waiting.
CudaStatus Load();

// Enqueues the plan of `problem` for expert_idx, int32 [R, T, K] on the device. Allocates nothing,
// does not wait, and relies on no content of the output arrays.
CudaStatus Launch(cudaStream_t stream, const PlanProblem& problem, const int32_t* expert_idx,
                  const PlanArrays& arrays);

}  // namespace megamoe::plan
