// The forward of the layer in one persistent kernel.
#include "kernel/forward.h"
#include "kernel/forward_steps.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/shared_memory.cuh"
#include "roles/combine.cuh"
#include "roles/dispatch.cuh"
#include "roles/load.cuh"
#include "roles/multiply.cuh"
#include "roles/store.cuh"
#include "shared/launch.h"

namespace megamoe {
namespace {

// Registers of a thread: the first warpgroup gives some to the two that multiply.
constexpr int kServiceRegisters = 120;
constexpr int kMultiplyRegisters = 192;
static_assert(kServiceRegisters + kNumConsumers * kMultiplyRegisters <= 504,
              "65536 registers over three warpgroups, in steps of 8");

// Warps of the first warpgroup; the other two multiply.
enum ServiceWarp { kLoadWarp, kStoreWarp, kFirstCommWarp };

__device__ __forceinline__ void Serve(SharedMemory& shared, const ForwardMaps& maps,
                                      const ForwardParams& p, int warp) {
  const bool multiplies = p.parts & (kGateUp | kDown);
  if (warp == kLoadWarp) {
    if (multiplies) LoadRole<ForwardSteps>(shared, maps, p).Run();
  } else if (warp == kStoreWarp) {
    if (multiplies) StoreRole<ForwardSteps>(shared, maps, p).Run();
  } else {
    const int comm_warp = warp - kFirstCommWarp;
    if (p.parts & kDispatch) {
      DispatchRole(shared, p, comm_warp).Run();
      ZeroUnrouted(p, blockIdx.x * kCombineWarps + comm_warp, gridDim.x * kCombineWarps);
    }
    // Pieces become batches: nothing may be on its way into them.
    if ((p.parts & kCombine) && !HasFailed(p.wait)) {
      const int first = comm_warp * kCombineBatches;
      CombineRole<kCombineBatches>(p, shared.combine + first, AddressOf(shared.batch_full, first))
          .Run();
    }
  }
}

// The products of one warpgroup, then a share of the sums that are left.
__device__ __forceinline__ void MultiplyThenHelp(SharedMemory& shared, const ForwardParams& p,
                                                 int consumer, int consumer_warp) {
  bool came = true;
  if (p.parts & (kGateUp | kDown)) came = MultiplyRole<ForwardSteps>(shared, p, consumer).Run();
  if (p.parts & kCombine) {
    // The stages become batches: no product may read them any more. Nor does the peer copy into
    // them: this block's products have waited for all its copies, unless a wait gave up.
    __syncwarp();
    if (ptx::ElectOne()) ptx::BarrierArrive(AddressOf(shared.products_end, 0));
    came &= BarrierWait(AddressOf(shared.products_end, 0), 0, p.wait) && !HasFailed(p.wait);
    if (!__all_sync(kAllLanes, came)) return;
    const int first = consumer_warp * kHelperBatches;
    CombineRole<kHelperBatches>(p, reinterpret_cast<Batch*>(shared.stages) + first,
                                AddressOf(shared.batch_full, kAllCombineBatches + first))
        .Run();
  }
}

__global__ __cluster_dims__(kPairBlocks)
    __launch_bounds__(kBlockThreads,
                      1) void ForwardKernel(const __grid_constant__ ForwardMaps maps,
                                            const __grid_constant__ ForwardParams p) {
  SharedMemory& shared = BlockMemory();
  if (threadIdx.x == 0) InitBarriers(shared);
  ptx::ClusterSync();
  ptx::WaitForPreviousKernel();
  // Uniform over the warp, and the compiler knows it.
  const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);
  const int warp = __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  // setmaxnreg takes effect only if all that follows it is one branch.
  if (group == 0) {
    ptx::GiveRegisters<kServiceRegisters>();
    Serve(shared, maps, p, warp);
    LeaveTogether(p.wait);
  } else {
    ptx::TakeRegisters<kMultiplyRegisters>();
    MultiplyThenHelp(shared, p, group - 1, warp - kGroupThreads / kWarpThreads);
    LeaveTogether(p.wait);
  }
}

}  // namespace

CudaStatus LoadForward() {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      ForwardKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemory)));
  return {};
}

CudaStatus LaunchForward(cudaStream_t stream, int num_multiprocessors, const ForwardMaps& maps,
                         const ForwardParams& params, bool starts_early) {
  cudaLaunchAttribute early = EarlyStart();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_multiprocessors / kPairBlocks * kPairBlocks);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = sizeof(SharedMemory);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, ForwardKernel, maps, params));
  return {};
}

#ifdef MEGAMOE_DELAYS
CudaStatus SetDelaySeed(uint32_t seed) {
  const uint32_t none[kNumDelaySites] = {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyToSymbol(num_delays, none, sizeof(none)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyToSymbol(delay_seed, &seed, sizeof(seed)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return {};
}

CudaStatus CountDelays(std::vector<uint32_t>* delays) {
  delays->resize(kNumDelaySites);
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaMemcpyFromSymbol(delays->data(), num_delays, kNumDelaySites * sizeof(uint32_t)));
  return {};
}
#endif

}  // namespace megamoe
