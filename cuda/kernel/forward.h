// Host entry of the forward kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/forward.h"

namespace megamoe {

// Loads the kernel on the current device.
CudaStatus LoadForward();

// Enqueues one launch with two blocks, a cluster, for each pair of multiprocessors; it finishes
// with any number of clusters resident. starts_early: before the kernel ahead in the stream has
// ended, see shared/launch.h.
CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early);

#ifdef MEGAMOE_DELAYS
// Waits for the current device and sets the seed of the delays of later calls, 0 for none.
CudaStatus SetForwardDelays(uint32_t seed);
// Adds the long delays since then to those at each site, kNumDelaySites (pipeline/delay.cuh).
CudaStatus AddForwardDelays(uint32_t* delays);
#endif

#ifdef MEGAMOE_FAULTS
// Waits for the current device and sets the fault that later calls have (pipeline/mutation.cuh).
CudaStatus SetForwardFault(uint32_t fault);
#endif

}  // namespace megamoe
