// The backward with precision="fp8_block", of SwiGLU without biases on one rank: for either dtype
// of the weight gradients, with g and u kept by the forward or not.
#include "kernel/backward_fp8.h"
#include "kernel/backward_fp8_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <typename Gradients, bool kTakesGateUp>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void Fp8BackwardKernel(const __grid_constant__ Fp8BackwardMaps maps,
                                                const __grid_constant__ Fp8BackwardParams p) {
  Skeleton<Fp8BackwardSteps<Gradients, kTakesGateUp>>::Run(maps, p);
}

// By 2 * float_gradients + (g and u are kept).
using Kernel = void (*)(Fp8BackwardMaps, Fp8BackwardParams);
constexpr Kernel kAll[4] = {
    Fp8BackwardKernel<Bf16Gradients, false>, Fp8BackwardKernel<Bf16Gradients, true>,
    Fp8BackwardKernel<F32Gradients, false>, Fp8BackwardKernel<F32Gradients, true>};

}  // namespace

CudaStatus LoadFp8Backward() {
  for (const Kernel kernel : kAll) {
    if (CudaStatus status = LoadKernel(kernel); !status.ok()) return status;
  }
  return {};
}

CudaStatus LaunchFp8Backward(cudaStream_t stream, int num_multiprocessors,
                             const Fp8BackwardMaps& maps, const Fp8BackwardParams& params,
                             bool float_gradients, bool starts_early) {
  const Kernel kernel = kAll[2 * float_gradients + (params.gate_up != nullptr)];
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
