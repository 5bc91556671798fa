#include "comm/wait.cuh"
#include "comm/wait_probe.h"

namespace megamoe {
namespace {

constexpr int kThreads = 64;
constexpr int kReleaser = 32;  // of the other warp than the thread that waits
constexpr uint32_t kRaised = 1;

__global__ __launch_bounds__(kThreads, 1) void WaitProbe(WaitContext context, int64_t release_ns,
                                                         bool trap_on_fault, ProbeArrays arrays) {
  if (threadIdx.x == 0) *arrays.flag = 0;
  __syncthreads();
  if (threadIdx.x == kReleaser && release_ns >= 0) {
    const uint64_t start_ns = ptx::GlobalTimerNs();
    while (ptx::GlobalTimerNs() - start_ns < static_cast<uint64_t>(release_ns)) {
    }
    ptx::StoreReleaseSystem(arrays.flag, kRaised);
  }
  if (threadIdx.x < kReleaser) {
    const WaitSite site = {Phase::kProbe, /*peer=*/1, /*expert=*/3, /*block=*/7};
    const auto poll = [&] { return ptx::LoadAcquireSystem(arrays.flag); };
    const bool came = BoundedWait(true, poll, kRaised, /*pause_ns=*/0, context, site);
    if (threadIdx.x == 0) *arrays.result = came;
    if (!came && trap_on_fault) __trap();
  }
}

}  // namespace

CudaStatus LoadWaitProbe() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, WaitProbe));
  return {};
}

CudaStatus LaunchWaitProbe(cudaStream_t stream, const WaitContext& context, int64_t release_ns,
                           bool trap_on_fault, const ProbeArrays& arrays) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaLaunchKernelEx(&config, WaitProbe, context, release_ns, trap_on_fault, arrays));
  return {};
}

}  // namespace megamoe
