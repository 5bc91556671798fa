// Host entry of the backward kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/backward.h"
#include "shared/cuda_status.h"

namespace megamoe {

// Loads the kernels on the current device.
CudaStatus LoadBackward();

// As LaunchForward. float_gradients: the weight gradients are float32, not bf16.
CudaStatus LaunchBackward(cudaStream_t stream, int num_multiprocessors, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool starts_early);

#ifdef MEGAMOE_DELAYS
// As SetForwardDelays and AddForwardDelays.
CudaStatus SetBackwardDelays(uint32_t seed);
CudaStatus AddBackwardDelays(uint32_t* delays);
#endif

#ifdef MEGAMOE_FAULTS
// As SetForwardFault.
CudaStatus SetBackwardFault(uint32_t fault);
#endif

}  // namespace megamoe
