// The forward of the layer in one persistent kernel for one activation, with g and u kept or not,
// with peers or without. Each .cu file that includes this has the kernels of one.
#pragma once

#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"

namespace megamoe {

template <bool kKeepsGateUp, bool kWithPeers, typename Activation>
__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void ForwardKernel(const __grid_constant__ ForwardMaps maps,
                                            const __grid_constant__ ForwardParams p) {
  Skeleton<ForwardSteps<kKeepsGateUp, kWithPeers, Activation>>::Run(maps, p);
}

template <typename Activation>
struct ForwardKernels {
  using Kernel = void (*)(ForwardMaps, ForwardParams);
  // By 2 * (there are peers) + (g and u are kept).
  static constexpr Kernel kAll[4] = {
      ForwardKernel<false, false, Activation>, ForwardKernel<true, false, Activation>,
      ForwardKernel<false, true, Activation>, ForwardKernel<true, true, Activation>};

  static CudaStatus Load() { return LoadKernels(kAll); }

  static CudaStatus Launch(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                           const ForwardParams& params, bool starts_early) {
    // The backward takes g and u of the first pass alone.
    const bool keeps = params.gate_up != nullptr && params.pass == 0;
    const Kernel kernel = kAll[2 * (params.dims.R > 1) + keeps];
    return LaunchKernel(kernel, stream, num_multiprocessors, maps, params, starts_early);
  }
};

}  // namespace megamoe
