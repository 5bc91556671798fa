// The backward of the layer in one persistent kernel, for either dtype of the weight gradients.
#include "kernel/backward.h"
#include "kernel/backward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {
namespace {

template <typename Gradients>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void BackwardKernel(const __grid_constant__ BackwardMaps maps,
                                             const __grid_constant__ BackwardParams p) {
  Skeleton<BackwardSteps<Gradients>>::Run(maps, p);
}

}  // namespace

CudaStatus LoadBackward() {
  if (CudaStatus status = LoadKernel(BackwardKernel<Bf16Gradients>); !status.ok()) return status;
  return LoadKernel(BackwardKernel<F32Gradients>);
}

CudaStatus LaunchBackward(cudaStream_t stream, int num_multiprocessors, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool starts_early) {
  const auto kernel =
      float_gradients ? BackwardKernel<F32Gradients> : BackwardKernel<Bf16Gradients>;
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
