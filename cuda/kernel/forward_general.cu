// The forward of any activation, with biases or without: see kernel/activation.cuh.
#include "kernel/forward_kernels.cuh"
#include "kernel/general.h"

namespace megamoe {

using GeneralKernels = ForwardKernels<GeneralUnit>;

CudaStatus LoadGeneralForward() { return GeneralKernels::Load(); }

CudaStatus LaunchGeneralForward(cudaStream_t stream, int num_multiprocessors,
                                const ForwardMaps& maps, const ForwardParams& params,
                                bool starts_early) {
  return GeneralKernels::Launch(stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetGeneralForwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddGeneralForwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetGeneralForwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
