// Host entry of the kernel that quantises rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/fp8.h"

namespace megamoe {

// Loads the kernel on the current device.
CudaStatus LoadQuantizeRows();

// Enqueues the kernel.
CudaStatus LaunchQuantizeRows(cudaStream_t stream, const QuantizeParams& params);

}  // namespace megamoe
