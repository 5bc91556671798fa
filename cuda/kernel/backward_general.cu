// The backward of any activation, with biases or without: see kernel/activation.cuh.
#include "kernel/backward_kernels.cuh"
#include "kernel/general.h"

namespace megamoe {

using GeneralKernels = BackwardKernels<GeneralUnit>;

CudaStatus LoadGeneralBackward() { return GeneralKernels::Load(); }

CudaStatus LaunchGeneralBackward(cudaStream_t stream, int num_multiprocessors,
                                 const BackwardMaps& maps, const BackwardParams& params,
                                 bool float_gradients, bool starts_early) {
  return GeneralKernels::Launch(stream, num_multiprocessors, maps, params, float_gradients,
                                starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetGeneralBackwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddGeneralBackwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetGeneralBackwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
