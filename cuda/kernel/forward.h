// Host entry of the forward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include "shared/cuda_status.h"
#include "shared/forward.h"

namespace megamoe {

// Loads the kernel on the current device.
CudaStatus LoadForward();

// Enqueues one launch with as many blocks as the device has multiprocessors; it finishes with any
// number of them resident.
CudaStatus LaunchForward(cudaStream_t stream, int num_blocks, const ForwardMaps& maps,
                         const ForwardParams& params);

}  // namespace megamoe
