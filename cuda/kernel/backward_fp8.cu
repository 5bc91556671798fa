// The backward with precision="fp8_block", of SwiGLU without biases: for either dtype of the weight
// gradients, with g and u kept by the forward or not, with peers or without; and for passes that
// add to the weight gradients of the first.
#include "kernel/backward_fp8.h"
#include "kernel/backward_fp8_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <typename Gradients, bool kTakesGateUp, bool kWithPeers>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void Fp8BackwardKernel(const __grid_constant__ Fp8BackwardMaps maps,
                                                const __grid_constant__ Fp8BackwardParams p) {
  Skeleton<Fp8BackwardSteps<Gradients, kTakesGateUp, kWithPeers>>::Run(maps, p);
}

// By 4 * (there are peers) + 2 * float_gradients + (g and u are kept).
using Kernel = void (*)(Fp8BackwardMaps, Fp8BackwardParams);
constexpr Kernel kAll[8] = {
    Fp8BackwardKernel<Bf16Gradients, false, false>, Fp8BackwardKernel<Bf16Gradients, true, false>,
    Fp8BackwardKernel<F32Gradients, false, false>,  Fp8BackwardKernel<F32Gradients, true, false>,
    Fp8BackwardKernel<Bf16Gradients, false, true>,  Fp8BackwardKernel<Bf16Gradients, true, true>,
    Fp8BackwardKernel<F32Gradients, false, true>,   Fp8BackwardKernel<F32Gradients, true, true>};

// For passes behind the first: of their rows g and u are not kept.
constexpr Kernel kAdding = Fp8BackwardKernel<AddedGradients, false, true>;

}  // namespace

CudaStatus LoadFp8Backward() { return FirstFailure({LoadKernels(kAll), LoadKernel(kAdding)}); }

CudaStatus LaunchFp8Backward(cudaStream_t stream, int num_multiprocessors,
                             const Fp8BackwardMaps& maps, const Fp8BackwardParams& params,
                             bool float_gradients, bool starts_early) {
  const bool has_peers = params.dims.R > 1;
  const Kernel first = kAll[4 * has_peers + 2 * float_gradients + (params.gate_up != nullptr)];
  const Kernel kernel = params.pass > 0 ? kAdding : first;
  return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetFp8BackwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddFp8BackwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetFp8BackwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
