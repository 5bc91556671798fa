// The forward of the layer in one persistent kernel, with g and u kept or not.
#include "kernel/forward.h"
#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <bool kKeepsGateUp>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void ForwardKernel(const __grid_constant__ ForwardMaps maps,
                                            const __grid_constant__ ForwardParams p) {
  Skeleton<ForwardSteps<kKeepsGateUp>>::Run(maps, p);
}

}  // namespace

CudaStatus LoadForward() {
  if (CudaStatus status = LoadKernel(ForwardKernel<false>); !status.ok()) return status;
  return LoadKernel(ForwardKernel<true>);
}

CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early) {
  const auto kernel = params.gate_up != nullptr ? ForwardKernel<true> : ForwardKernel<false>;
  return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetForwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddForwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetForwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
