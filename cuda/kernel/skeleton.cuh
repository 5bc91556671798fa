// The body of the kernel of a pass, given its steps: which warp takes which role, and how one is
// launched.
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "roles/combine.cuh"
#include "roles/dispatch.cuh"
#include "roles/finish.cuh"
#include "roles/load.cuh"
#include "roles/multiply.cuh"
#include "roles/store.cuh"
#include "shared/cuda_status.h"
#include "shared/launch.h"

namespace megamoe {

template <typename Steps>
struct Skeleton {
  using Params = typename Steps::Params;
  using Maps = typename Steps::Maps;

  static_assert(Steps::kServiceRegisters + kNumConsumers * Steps::kMultiplyRegisters <= 504,
                "65536 registers over three warpgroups, in steps of 8");

  // Warps of the first warpgroup; the other two multiply.
  enum ServiceWarp { kLoadWarp, kStoreWarp, kFirstCommWarp };

  static __device__ __forceinline__ void Run(const Maps& maps, const Params& p) {
    SharedMemory& shared = BlockMemory();
    if (threadIdx.x == 0) InitBarriers(shared);
    ptx::ClusterSync();
    ptx::WaitForPreviousKernel();
    if constexpr (Steps::kHasPeers) {
      // The same word for both blocks: none waits for the other.
      if (p.pass >= p.plan.totals[2]) return;
    }
    // Uniform over the warp, and the compiler knows it.
    const int group = __shfl_sync(kAllLanes, threadIdx.x / kGroupThreads, 0);
    // setmaxnreg takes effect only if all that follows it is one branch.
    if (group == 0) {
      ptx::GiveRegisters<Steps::kServiceRegisters>();
      Serve(shared, maps, p, Warp());
      ptx::ClusterSync();  // the peer may still arrive here
    } else {
      ptx::TakeRegisters<Steps::kMultiplyRegisters>();
      MultiplyThenHelp(shared, p, group - 1);
      ptx::ClusterSync();
    }
  }

  static __device__ __forceinline__ int Warp() {
    return __shfl_sync(kAllLanes, threadIdx.x / kWarpThreads, 0);
  }

  static __device__ __forceinline__ void Serve(SharedMemory& shared, const Maps& maps,
                                               const Params& p, int warp) {
    const bool multiplies = p.parts & Steps::kProductParts;
    if (warp == kLoadWarp) {
      if (multiplies) LoadRole<Steps>(shared, maps, p).Run();
    } else if (warp == kStoreWarp) {
      if (multiplies) StoreRole<Steps>(shared, maps, p).Run();
    } else {
      const int comm_warp = warp - kFirstCommWarp;
      if (p.parts & kDispatch) {
        DispatchRole<Steps>(shared, p, comm_warp).Run();
        const int of_grid = blockIdx.x * kCombineWarps + comm_warp;
        const int num_warps = gridDim.x * kCombineWarps;
        if constexpr (!Steps::kHasPeers) {
          if (!HasFault(SeededFault::kUnroutedNotZeroed)) {
            ZeroUnrouted<Steps>(p, of_grid, num_warps);
          }
        }
        Steps::ZeroUnused(p, of_grid, num_warps);
      }
      if (p.parts & kCombine) {
        const int first = (Warp() - kFirstCommWarp) * kCombineBatches;
        CombineRole<Steps, kCombineBatches>(p, shared.combine + first,
                                            AddressOf(shared.batch_full, first))
            .Run();
      }
      FinishOwn<Steps::kFewRegisters ? 2 : 4>(p);
    }
  }

  // Behind all that other ranks wait for.
  template <int kColumns>
  static __device__ __forceinline__ void FinishOwn(const Params& p) {
    if constexpr (Steps::kHasPeers) {
      if (p.parts & kFinish) FinishRole<Steps, kColumns>(p).Run();
    }
  }

  // The products of one warpgroup, then a share of the sums that are left.
  static __device__ __forceinline__ void MultiplyThenHelp(SharedMemory& shared, const Params& p,
                                                          int consumer) {
    if constexpr (Steps::kFewRegisters) consumer = threadIdx.x / kGroupThreads - 1;
    if (p.parts & Steps::kProductParts) MultiplyRole<Steps>(shared, p, consumer).Run();
    if (p.parts & kCombine) {
      // The stages become batches: no product may read them any more. Nor does the peer copy into
      // them: this block's products have waited for all its copies.
      __syncwarp();
      if (ptx::ElectOne()) ptx::BarrierArrive(AddressOf(shared.products_end, 0));
      ptx::BarrierWait(AddressOf(shared.products_end, 0), 0);
      const int first = (Warp() - kGroupWarps) * kHelperBatches;
      CombineRole<Steps, kHelperBatches>(p, reinterpret_cast<Batch*>(shared.stages) + first,
                                         AddressOf(shared.batch_full, kAllCombineBatches + first))
          .Run();
    }
    FinishOwn<4>(p);
  }
};

// Lets `kernel` have its shared memory, and loads it on the current device.
template <typename Maps, typename Params>
CudaStatus LoadKernel(void (*kernel)(Maps, Params)) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(SharedMemory)));
  return {};
}

template <typename Kernel, int kNumKernels>
CudaStatus LoadKernels(const Kernel (&kernels)[kNumKernels]) {
  for (const Kernel kernel : kernels) {
    if (CudaStatus status = LoadKernel(kernel); !status.ok()) return status;
  }
  return {};
}

// Two blocks, a cluster, for each pair of multiprocessors. starts_early: shared/launch.h.
template <typename Maps, typename Params>
CudaStatus LaunchKernel(void (*kernel)(Maps, Params), cudaStream_t stream, int num_multiprocessors,
                        const Maps& maps, const Params& params, bool starts_early) {
  cudaLaunchAttribute early = EarlyStart();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(num_multiprocessors / kPairBlocks * kPairBlocks);
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = sizeof(SharedMemory);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = starts_early ? 1 : 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, kernel, maps, params));
  return {};
}

#ifdef MEGAMOE_DELAYS
// The delays of the kernels of this file (pipeline/delay.cuh): sets their seed; adds how many there
// were to `delays`.
static CudaStatus SetDelaySeedHere(uint32_t seed) {
  const uint32_t none[kNumDelaySites] = {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyToSymbol(num_delays, none, sizeof(none)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyToSymbol(delay_seed, &seed, sizeof(seed)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return {};
}
static CudaStatus AddDelaysHere(uint32_t* delays) {
  uint32_t found[kNumDelaySites];
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyFromSymbol(found, num_delays, sizeof(found)));
  for (int i = 0; i < kNumDelaySites; ++i) delays[i] += found[i];
  return {};
}
#endif

#if defined(MEGAMOE_FAULTS) && defined(__CUDACC__)
// The fault that the kernels of this file have (pipeline/mutation.cuh).
static CudaStatus SetFaultHere(uint32_t fault) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyToSymbol(seeded_fault, &fault, sizeof(fault)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  return {};
}
#endif

}  // namespace megamoe
