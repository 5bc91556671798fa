// The forward with precision="fp8_block", of SwiGLU without biases.
#include "kernel/forward_fp8.h"
#include "kernel/forward_fp8_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <bool kKeepsGateUp, bool kWithPeers>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void Fp8ForwardKernel(const __grid_constant__ Fp8ForwardMaps maps,
                                               const __grid_constant__ Fp8ForwardParams p) {
  Skeleton<Fp8ForwardSteps<kKeepsGateUp, kWithPeers>>::Run(maps, p);
}

// By 2 * (there are peers) + (g and u are kept).
using Kernel = void (*)(Fp8ForwardMaps, Fp8ForwardParams);
constexpr Kernel kAll[4] = {Fp8ForwardKernel<false, false>, Fp8ForwardKernel<true, false>,
                            Fp8ForwardKernel<false, true>, Fp8ForwardKernel<true, true>};

}  // namespace

CudaStatus LoadFp8Forward() { return LoadKernels(kAll); }

CudaStatus LaunchFp8Forward(cudaStream_t stream, int num_multiprocessors,
                            const Fp8ForwardMaps& maps, const Fp8ForwardParams& params,
                            bool starts_early) {
  // The backward takes g and u of the first pass alone.
  const bool keeps = params.gate_up != nullptr && params.pass == 0;
  const Kernel kernel = kAll[2 * (params.dims.R > 1) + keeps];
  return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetFp8ForwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddFp8ForwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetFp8ForwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
