// The backward of the layer in one persistent kernel, for either dtype of the weight gradients,
// with g and u kept by the forward or not, with peers or without; and for passes that add to the
// weight gradients of the first.
#include "kernel/backward.h"
#include "kernel/backward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <typename Gradients, bool kTakesGateUp, bool kWithPeers>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void BackwardKernel(const __grid_constant__ BackwardMaps maps,
                                             const __grid_constant__ BackwardParams p) {
  Skeleton<BackwardSteps<Gradients, kTakesGateUp, kWithPeers>>::Run(maps, p);
}

using Kernel = void (*)(BackwardMaps, BackwardParams);
// By 4 * (there are peers) + 2 * float_gradients + (g and u are kept).
constexpr Kernel kKernels[] = {
    BackwardKernel<Bf16Gradients, false, false>, BackwardKernel<Bf16Gradients, true, false>,
    BackwardKernel<F32Gradients, false, false>,  BackwardKernel<F32Gradients, true, false>,
    BackwardKernel<Bf16Gradients, false, true>,  BackwardKernel<Bf16Gradients, true, true>,
    BackwardKernel<F32Gradients, false, true>,   BackwardKernel<F32Gradients, true, true>};

// For passes behind the first: of their rows g and u are not kept.
constexpr Kernel kAddingKernel = BackwardKernel<AddedGradients, false, true>;

}  // namespace

CudaStatus LoadBackward() {
  for (const Kernel kernel : kKernels) {
    if (CudaStatus status = LoadKernel(kernel); !status.ok()) return status;
  }
  return LoadKernel(kAddingKernel);
}

CudaStatus LaunchBackward(cudaStream_t stream, int num_multiprocessors, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool starts_early) {
  const bool has_peers = params.dims.R > 1;
  const Kernel first = kKernels[4 * has_peers + 2 * float_gradients + (params.gate_up != nullptr)];
  const Kernel kernel = params.pass > 0 ? kAddingKernel : first;
  return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetBackwardDelays(uint32_t seed) { return SetDelaySeedHere(seed); }
CudaStatus AddBackwardDelays(uint32_t* delays) { return AddDelaysHere(delays); }
#endif

#ifdef MEGAMOE_FAULTS
CudaStatus SetBackwardFault(uint32_t fault) { return SetFaultHere(fault); }
#endif

}  // namespace megamoe
