// The forward of SwiGLU without biases, and the entries of all forward kernels.
#include "kernel/forward.h"
#include "kernel/forward_kernels.cuh"
#include "kernel/general.h"

namespace megamoe {

using Kernels = ForwardKernels<SwiGlu>;

CudaStatus LoadForward() { return FirstFailure({Kernels::Load(), LoadGeneralForward()}); }

CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early) {
  const auto launch =
      IsGeneral(params.unit, params.biases) ? LaunchGeneralForward : Kernels::Launch;
  return launch(stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetForwardDelays(uint32_t seed) {
  return FirstFailure({SetDelaySeedHere(seed), SetGeneralForwardDelays(seed)});
}
CudaStatus AddForwardDelays(uint32_t* delays) {
  return FirstFailure({AddDelaysHere(delays), AddGeneralForwardDelays(delays)});
}
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetForwardFault(uint32_t fault) {
  return FirstFailure({SetFaultHere(fault), SetGeneralForwardFault(fault)});
}
#endif

}  // namespace megamoe
