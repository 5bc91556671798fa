// Host entry of the kernel that quantises rows.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/fp8.h"

namespace megamoe {

// Loads the kernel on the current device.
CudaStatus LoadQuantizeRows();

// Enqueues the kernel. starts_early: it runs beside the one ahead in the stream, whose results it
// does not read, and the next one may begin early (ptx::WaitForPreviousKernel).
CudaStatus LaunchQuantizeRows(cudaStream_t stream, int num_multiprocessors,
                              const QuantizeParams& params, bool starts_early);

}  // namespace megamoe
