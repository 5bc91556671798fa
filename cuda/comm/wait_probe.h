// A kernel that only waits: the experiment and the tests of the bounded wait.
#pragma once

#include <cuda_runtime_api.h>

#include "shared/cuda_status.h"
#include "shared/fault.h"

namespace megamoe {

struct ProbeArrays {
  uint32_t* flag;   // [1], the kernel resets it
  int32_t* result;  // [1], 1 when the flag came, else 0
};

CudaStatus LoadWaitProbe();

// Waits for a flag that the kernel itself raises after release_ns, or never if that is negative.
// With trap_on_fault the kernel traps when the wait fails.
CudaStatus LaunchWaitProbe(cudaStream_t stream, const WaitContext& context, int64_t release_ns,
                           bool trap_on_fault, const ProbeArrays& arrays);

}  // namespace megamoe
