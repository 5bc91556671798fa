// The kernels of any activation and of biases, which lie in files of their own, as those that
// forward.h and backward.h name take them up.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/backward.h"
#include "shared/cuda_status.h"
#include "shared/forward.h"

namespace megamoe {

CudaStatus LoadGeneralForward();
CudaStatus LaunchGeneralForward(cudaStream_t stream, int num_multiprocessors,
                                const ForwardMaps& maps, const ForwardParams& params,
                                bool starts_early);

CudaStatus LoadGeneralBackward();
CudaStatus LaunchGeneralBackward(cudaStream_t stream, int num_multiprocessors,
                                 const BackwardMaps& maps, const BackwardParams& params,
                                 bool float_gradients, bool starts_early);

#ifdef MEGAMOE_DELAYS
CudaStatus SetGeneralForwardDelays(uint32_t seed);
CudaStatus AddGeneralForwardDelays(uint32_t* delays);
CudaStatus SetGeneralBackwardDelays(uint32_t seed);
CudaStatus AddGeneralBackwardDelays(uint32_t* delays);
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetGeneralForwardFault(uint32_t fault);
CudaStatus SetGeneralBackwardFault(uint32_t fault);
#endif

}  // namespace megamoe
