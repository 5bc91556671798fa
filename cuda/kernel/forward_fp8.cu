// The forward with precision="fp8_block", of SwiGLU without biases.
#include "kernel/forward_fp8.h"
#include "kernel/forward_fp8_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <bool kKeepsGateUp>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void Fp8ForwardKernel(const __grid_constant__ Fp8ForwardMaps maps,
                                               const __grid_constant__ Fp8ForwardParams p) {
  Skeleton<Fp8ForwardSteps<kKeepsGateUp>>::Run(maps, p);
}

}  // namespace

CudaStatus LoadFp8Forward() {
  return FirstFailure({LoadKernel(Fp8ForwardKernel<false>), LoadKernel(Fp8ForwardKernel<true>)});
}

CudaStatus LaunchFp8Forward(cudaStream_t stream, int num_multiprocessors,
                            const Fp8ForwardMaps& maps, const Fp8ForwardParams& params,
                            bool starts_early) {
  const auto kernel = params.gate_up != nullptr ? Fp8ForwardKernel<true> : Fp8ForwardKernel<false>;
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
