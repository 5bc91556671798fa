#include "comm/share_inputs.cuh"

namespace megamoe {
namespace {

// A block on each multiprocessor: registers for one, not for as many as fit.
__global__ __launch_bounds__(kShareThreads,
                             1) void ShareKernel(const __grid_constant__ ShareParams params) {
  ShareInputs(params);
}

}  // namespace

CudaStatus LoadShareInputs() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, ShareKernel));
  return {};
}

CudaStatus LaunchShareInputs(cudaStream_t stream, int num_multiprocessors,
                             const ShareParams& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_multiprocessors);
  config.blockDim = dim3(kShareThreads);
  config.stream = stream;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, ShareKernel, params));
  return {};
}

}  // namespace megamoe
