#include "host/fault.h"

#include <cuda_runtime.h>

#include <map>
#include <mutex>

namespace megamoe {
namespace {

struct Channel {
  FaultPage* page;
  FaultPage* device_page;
  uint32_t* failed_epoch;
  uint32_t last_epoch;
};

// Never destroyed: host functions of a stream may run while the process ends.
std::mutex& Mutex() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::map<int, Channel>& Channels() {
  static auto* channels = new std::map<int, Channel>;
  return *channels;
}

std::string Text(const FaultRecord& r) {
  const auto number = [](const char* name, int64_t value) {
    return std::string(", ") + name + " " + std::to_string(value);
  };
  const std::string why = r.cause == FaultCause::kAbort ? "was told to stop waiting for rank "
                                                        : "gave up waiting for rank ";
  return "rank " + std::to_string(r.rank) + " " + why + std::to_string(r.peer) + " after " +
         std::to_string(r.waited_ns / 1000000) + " ms: phase " +
         kPhaseNames[static_cast<uint32_t>(r.phase)] + number("expert", r.expert) +
         number("block", r.block) + number("expected flag", r.expected) + number("found", r.found) +
         number("epoch", r.epoch);
}

}  // namespace

CudaStatus OpenFaultChannel(int device) {
  Channel channel = {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&channel.page, sizeof(FaultPage), cudaHostAllocMapped | cudaHostAllocPortable));
  *channel.page = {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaHostGetDevicePointer(&channel.device_page, channel.page, 0));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMalloc(&channel.failed_epoch, sizeof(uint32_t)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemset(channel.failed_epoch, 0, sizeof(uint32_t)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // the memset may return before
  const std::lock_guard<std::mutex> lock(Mutex());
  Channels()[device] = channel;
  return {};
}

WaitContext NextCall(int device, int rank, uint64_t deadline_ns) {
  const std::lock_guard<std::mutex> lock(Mutex());
  Channel& channel = Channels().at(device);
  if (++channel.last_epoch == 0) ++channel.last_epoch;
  // Keeps the abort word behind the calls when epochs wrap: its calls are long done by then.
  constexpr uint32_t kFarBehind = 1u << 30;
  uint32_t* abort_epoch = &channel.page->abort_epoch;
  if (channel.last_epoch - *abort_epoch > kFarBehind) {
    __atomic_store_n(abort_epoch, channel.last_epoch - kFarBehind, __ATOMIC_RELAXED);
  }
  return {channel.device_page, channel.failed_epoch, deadline_ns, channel.last_epoch, rank};
}

std::string TakeFault(int device) {
  const std::lock_guard<std::mutex> lock(Mutex());
  const auto found = Channels().find(device);
  if (found == Channels().end()) return "";
  FaultPage* page = found->second.page;
  const uint32_t epoch = __atomic_load_n(&page->record_epoch, __ATOMIC_ACQUIRE);
  if (epoch == page->taken_epoch) return "";
  const std::string text = Text(page->record);
  __atomic_store_n(&page->taken_epoch, epoch, __ATOMIC_RELEASE);
  return text;
}

bool AbortWaits(int device) {
  const std::lock_guard<std::mutex> lock(Mutex());
  const auto found = Channels().find(device);
  if (found == Channels().end()) return false;
  const Channel& channel = found->second;
  __atomic_store_n(&channel.page->abort_epoch, channel.last_epoch, __ATOMIC_RELAXED);
  return true;
}

}  // namespace megamoe
