// The forward of the layer in one persistent kernel.
#include "kernel/forward.h"

#include "kernel/forward_steps.cuh"
#include "pipeline/shared_memory.cuh"
#include "roles/combine.cuh"
#include "roles/dispatch.cuh"
#include "roles/load.cuh"
#include "roles/multiply.cuh"
#include "roles/store.cuh"

namespace megamoe {
namespace {

// Registers of a thread: the first warpgroup gives some to the two that multiply.
constexpr int kServiceRegisters = 88;
constexpr int kMultiplyRegisters = 208;
static_assert(kServiceRegisters + kNumConsumers * kMultiplyRegisters <= 504,
              "65536 registers over three warpgroups, in steps of 8");

// Warps of the first warpgroup; the other two multiply.
constexpr int kLoadWarp = 0;
constexpr int kStoreWarp = 1;

// Claims of the warps that multiply before they start: the first tiles are ready sooner.
constexpr int kHelpingClaims = 1;

__device__ __forceinline__ void Serve(SharedMemory& shared, const ForwardMaps& maps,
                                      const ForwardParams& p, int warp) {
  const bool multiplies = p.phases & (kGateUp | kDown);
  if (warp == kLoadWarp) {
    if (multiplies) LoadRole<ForwardSteps>(shared, maps, p).Run();
  } else if (warp == kStoreWarp) {
    if (multiplies) StoreRole<ForwardSteps>(shared, maps, p).Run();
  } else if (p.phases & kDispatch) {
    DispatchRole dispatch(p);
    dispatch.Run(1 << 30);
    constexpr int kWarps = kGroupThreads / kWarpThreads - 2;
    dispatch.ZeroUnrouted(blockIdx.x * kWarps + warp - 2, gridDim.x * kWarps);
  }
}

__global__ __launch_bounds__(kBlockThreads, 1) void ForwardKernel(
    const __grid_constant__ ForwardMaps maps, const __grid_constant__ ForwardParams p) {
  SharedMemory& shared = BlockMemory();
  if (threadIdx.x == 0) InitBarriers(shared);
  __syncthreads();
  // Uniform over the warp, and the compiler knows it.
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupThreads, 0);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / kWarpThreads, 0);
  // setmaxnreg takes effect only if all that follows it is one branch: both end with the sums.
  if (group == 0) {
    ptx::GiveRegisters<kServiceRegisters>();
    Serve(shared, maps, p, warp);
    if (p.phases & kCombine) CombineRole(p).Run();
  } else {
    ptx::TakeRegisters<kMultiplyRegisters>();
    if (p.phases & kDispatch) DispatchRole(p).Run(kHelpingClaims);
    if (p.phases & (kGateUp | kDown)) MultiplyRole<ForwardSteps>(shared, p, group - 1).Run();
    if (p.phases & kCombine) CombineRole(p).Run();
  }
}

}  // namespace

CudaStatus LoadForward() {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      ForwardKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemory)));
  return {};
}

CudaStatus LaunchForward(cudaStream_t stream, int num_blocks, const ForwardMaps& maps,
                         const ForwardParams& params) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_blocks);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = sizeof(SharedMemory);
  config.stream = stream;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, ForwardKernel, maps, params));
  return {};
}

}  // namespace megamoe
