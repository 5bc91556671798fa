#include <chrono>
#include <thread>

#include "comm/hold.h"
#include "ptx/sync.cuh"

namespace megamoe {
namespace {

constexpr int kThreads = 32;
// No block of the forward kernel, and no second one of these, fits beside it.
constexpr int kSharedBytes = 200 * 1024;
constexpr auto kStartLimit = std::chrono::seconds(5);

// In pinned host memory; words of a block are its own, since atomics do not reach across PCIe.
struct HoldPage {
  uint32_t released;           // written by the host, release; polled by the blocks
  uint32_t started[kMaxHeld];  // written by the blocks, release; read by the host
  uint32_t stayed[kMaxHeld];   // likewise, 1 if the block saw `released` and not its deadline
};

struct Holder {
  cudaStream_t stream = nullptr;
  HoldPage* page = nullptr;
  HoldPage* device_page = nullptr;
  int count = 0;
};

Holder& TheHolder() {
  static Holder* holder = new Holder;  // never destroyed: blocks may outlive main
  return *holder;
}

__global__ __launch_bounds__(kThreads, 1) void Hold(HoldPage* page, uint64_t deadline_ns) {
  if (threadIdx.x != 0) return;
  const uint64_t start_ns = ptx::GlobalTimerNs();
  ptx::StoreReleaseSystem(page->started + blockIdx.x, 1);
  while (ptx::LoadAcquireSystem(&page->released) == 0) {
    if (ptx::GlobalTimerNs() - start_ns > deadline_ns) return;
    __nanosleep(1000);
  }
  ptx::StoreReleaseSystem(page->stayed + blockIdx.x, 1);
}

int CountSet(const uint32_t* words, int count) {
  int set = 0;
  for (int i = 0; i < count; ++i) set += __atomic_load_n(words + i, __ATOMIC_ACQUIRE);
  return set;
}

CudaStatus Open(Holder* holder) {
  if (holder->page != nullptr) return {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaFuncSetAttribute(Hold, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&holder->stream, cudaStreamNonBlocking));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaHostAlloc(&holder->page, sizeof(HoldPage), cudaHostAllocMapped));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaHostGetDevicePointer(&holder->device_page, holder->page, 0));
  return {};
}

}  // namespace

CudaStatus HoldMultiprocessors(int count, uint64_t deadline_ns) {
  Holder& holder = TheHolder();
  if (count < 1 || count > kMaxHeld || holder.count != 0) {
    return {cudaErrorInvalidValue, "HoldMultiprocessors"};
  }
  if (CudaStatus status = Open(&holder); !status.ok()) return status;
  *holder.page = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(count);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = holder.stream;
  // In pairs where it can be: what stays free is pairs too, which the kernels' clusters need.
  cudaLaunchAttribute pairs = {};
  pairs.id = cudaLaunchAttributeClusterDimension;
  pairs.val.clusterDim = {2, 1, 1};
  config.attrs = &pairs;
  config.numAttrs = count % 2 == 0 ? 1 : 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, Hold, holder.device_page, deadline_ns));
  holder.count = count;
  const auto limit = std::chrono::steady_clock::now() + kStartLimit;
  while (CountSet(holder.page->started, count) < count) {
    if (std::chrono::steady_clock::now() > limit) {
      int held = 0;
      if (CudaStatus status = ReleaseMultiprocessors(&held); !status.ok()) return status;
      return {cudaErrorNotReady, "HoldMultiprocessors"};
    }
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  return {};
}

CudaStatus ReleaseMultiprocessors(int* count) {
  Holder& holder = TheHolder();
  if (holder.count == 0) return {cudaErrorInvalidValue, "ReleaseMultiprocessors"};
  __atomic_store_n(&holder.page->released, 1, __ATOMIC_RELEASE);
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(holder.stream));
  *count = CountSet(holder.page->stayed, holder.count);
  holder.count = 0;
  return {};
}

}  // namespace megamoe
