// The forward of the layer in one persistent kernel.
#include "kernel/forward.h"
#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void ForwardKernel(const __grid_constant__ ForwardMaps maps,
                                            const __grid_constant__ ForwardParams p) {
  Skeleton<ForwardSteps>::Run(maps, p);
}

}  // namespace

CudaStatus LoadForward() { return LoadKernel(ForwardKernel); }

CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early) {
  return LaunchKernel(ForwardKernel, stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetForwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddForwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetForwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
