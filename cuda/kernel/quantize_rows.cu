#include <algorithm>

#include "kernel/quantize_rows.cuh"
#include "kernel/quantize_rows.h"

namespace megamoe {
namespace {

__global__ __launch_bounds__(kQuantizeThreads) void QuantizeKernel(
    const __grid_constant__ QuantizeParams params) {
  QuantizeRows(params);
}

}  // namespace

CudaStatus LoadQuantizeRows() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, QuantizeKernel));
  return {};
}

CudaStatus LaunchQuantizeRows(cudaStream_t stream, const QuantizeParams& params) {
  const int64_t threads = int64_t{params.num_rows} * (params.D / kQuantizedColumns);
  const int64_t blocks = (threads + kQuantizeThreads - 1) / kQuantizeThreads;
  if (blocks == 0) return {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX)));
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, QuantizeKernel, params));
  return {};
}

}  // namespace megamoe
