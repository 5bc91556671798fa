// The forward of the layer in one persistent kernel, with g and u kept or not, with peers or
// without.
#include "kernel/forward.h"
#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <bool kKeepsGateUp, bool kWithPeers>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void ForwardKernel(const __grid_constant__ ForwardMaps maps,
                                            const __grid_constant__ ForwardParams p) {
  Skeleton<ForwardSteps<kKeepsGateUp, kWithPeers>>::Run(maps, p);
}

using Kernel = void (*)(ForwardMaps, ForwardParams);
// By 2 * (there are peers) + (g and u are kept).
constexpr Kernel kKernels[] = {ForwardKernel<false, false>, ForwardKernel<true, false>,
                               ForwardKernel<false, true>, ForwardKernel<true, true>};

}  // namespace

CudaStatus LoadForward() {
  for (const Kernel kernel : kKernels) {
    if (CudaStatus status = LoadKernel(kernel); !status.ok()) return status;
  }
  return {};
}

CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early) {
  // The backward takes g and u of the first pass alone.
  const bool keeps = params.gate_up != nullptr && params.pass == 0;
  const Kernel kernel = kKernels[2 * (params.dims.R > 1) + keeps];
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
