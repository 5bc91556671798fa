// The backward of SwiGLU without biases, and the entries of all backward kernels.
#include "kernel/backward.h"
#include "kernel/backward_kernels.cuh"
#include "kernel/general.h"

namespace megamoe {

using Kernels = BackwardKernels<SwiGlu>;

CudaStatus LoadBackward() { return FirstFailure({Kernels::Load(), LoadGeneralBackward()}); }

CudaStatus LaunchBackward(cudaStream_t stream, int num_multiprocessors, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool starts_early) {
  const auto launch =
      IsGeneral(params.unit, params.biases) ? LaunchGeneralBackward : Kernels::Launch;
  return launch(stream, num_multiprocessors, maps, params, float_gradients, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetBackwardDelays(uint32_t seed) {
  return FirstFailure({SetDelaySeedHere(seed), SetGeneralBackwardDelays(seed)});
}
CudaStatus AddBackwardDelays(uint32_t* delays) {
  return FirstFailure({AddDelaysHere(delays), AddGeneralBackwardDelays(delays)});
}
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetBackwardFault(uint32_t fault) {
  return FirstFailure({SetFaultHere(fault), SetGeneralBackwardFault(fault)});
}
#endif

}  // namespace megamoe
