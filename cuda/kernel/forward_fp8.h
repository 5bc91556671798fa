// Host entry of the forward kernels with precision="fp8_block".
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/forward_fp8.h"

namespace megamoe {

// As LoadForward and LaunchForward.
CudaStatus LoadFp8Forward();
CudaStatus LaunchFp8Forward(cudaStream_t stream, int num_multiprocessors,
                            const Fp8ForwardMaps& maps, const Fp8ForwardParams& params,
                            bool starts_early);

#ifdef MEGAMOE_DELAYS
// As SetForwardDelays and AddForwardDelays.
CudaStatus SetFp8ForwardDelays(uint32_t seed);
CudaStatus AddFp8ForwardDelays(uint32_t* delays);
#endif

#ifdef MEGAMOE_FAULTS
// As SetForwardFault.
CudaStatus SetFp8ForwardFault(uint32_t fault);
#endif

}  // namespace megamoe
