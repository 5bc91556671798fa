#include <algorithm>

#include "kernel/quantize_rows.cuh"
#include "kernel/quantize_rows.h"
#include "shared/launch.h"

namespace megamoe {
namespace {

__global__ __launch_bounds__(kQuantizeThreads) void QuantizeKernel(
    const __grid_constant__ QuantizeParams params) {
  ptx::LetNextKernelStart();
  QuantizeRows(params);
  ptx::WaitForPreviousKernel();  // who waits for this kernel waits for that one, too
}

constexpr int kMultiprocessorBlocks = 4;

}  // namespace

CudaStatus LoadQuantizeRows() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, QuantizeKernel));
  return {};
}

CudaStatus LaunchQuantizeRows(cudaStream_t stream, int num_multiprocessors,
                              const QuantizeParams& params, bool starts_early) {
  const int64_t threads = int64_t{params.num_rows} * (params.D / kQuantizedColumns);
  const int64_t blocks = (threads + kQuantizeThreads - 1) / kQuantizeThreads;
  if (blocks == 0) return {};
  const int64_t most = int64_t{num_multiprocessors} * kMultiprocessorBlocks;
  cudaLaunchAttribute early = EarlyStart();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, most)));
  config.blockDim = dim3(kQuantizeThreads);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, QuantizeKernel, params));
  return {};
}

}  // namespace megamoe
