// The backward of the layer in one persistent kernel for one activation, for either dtype of the
// weight gradients, with g and u kept by the forward or not, with peers or without; and for passes
// that add to the weight gradients of the first. Each .cu file that includes this has the kernels
// of one activation.
#pragma once

#include "kernel/backward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {

template <typename Gradients, bool kTakesGateUp, bool kWithPeers, typename Activation>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void BackwardKernel(const __grid_constant__ BackwardMaps maps,
                                             const __grid_constant__ BackwardParams p) {
  Skeleton<BackwardSteps<Gradients, kTakesGateUp, kWithPeers, Activation>>::Run(maps, p);
}

template <typename Activation>
struct BackwardKernels {
  using Kernel = void (*)(BackwardMaps, BackwardParams);
  // By 4 * (there are peers) + 2 * float_gradients + (g and u are kept).
  static constexpr Kernel kAll[8] = {BackwardKernel<Bf16Gradients, false, false, Activation>,
                                     BackwardKernel<Bf16Gradients, true, false, Activation>,
                                     BackwardKernel<F32Gradients, false, false, Activation>,
                                     BackwardKernel<F32Gradients, true, false, Activation>,
                                     BackwardKernel<Bf16Gradients, false, true, Activation>,
                                     BackwardKernel<Bf16Gradients, true, true, Activation>,
                                     BackwardKernel<F32Gradients, false, true, Activation>,
                                     BackwardKernel<F32Gradients, true, true, Activation>};

  // For passes behind the first: of their rows g and u are not kept.
  static constexpr Kernel kAdding = BackwardKernel<AddedGradients, false, true, Activation>;

  static CudaStatus Load() { return FirstFailure({LoadKernels(kAll), LoadKernel(kAdding)}); }

  static CudaStatus Launch(cudaStream_t stream, int num_multiprocessors, const BackwardMaps& maps,
                           const BackwardParams& params, bool float_gradients, bool starts_early) {
    const bool has_peers = params.dims.R > 1;
    const Kernel first = kAll[4 * has_peers + 2 * float_gradients + (params.gate_up != nullptr)];
    const Kernel kernel = params.pass > 0 ? kAdding : first;
    return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
  }
};

}  // namespace megamoe
