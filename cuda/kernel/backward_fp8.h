// The kernels of the backward with precision="fp8_block".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/backward_fp8.h"
#include "shared/cuda_status.h"

namespace megamoe {

// Loads the kernels on the current device.
CudaStatus LoadFp8Backward();

// As LaunchBackward.
CudaStatus LaunchFp8Backward(cudaStream_t stream, int num_multiprocessors,
                             const Fp8BackwardMaps& maps, const Fp8BackwardParams& params,
                             bool float_gradients, bool starts_early);

#ifdef MEGAMOE_DELAYS
CudaStatus SetFp8BackwardDelays(uint32_t seed);
CudaStatus AddFp8BackwardDelays(uint32_t* delays);
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetFp8BackwardFault(uint32_t fault);
#endif

}  // namespace megamoe
