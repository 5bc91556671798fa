#include "host/fault.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

namespace megamoe {
namespace {

// Never destroyed: host functions of a stream may run while the process ends.
struct Registry {
  std::mutex mutex;
  std::vector<std::pair<int, FaultChannel*>> all;  // with their devices
  std::map<int, FaultChannel*> of_one_rank;
};
Registry& TheRegistry() {
  static auto* registry = new Registry;
  return *registry;
}

std::vector<std::pair<int, FaultChannel*>> AllChannels() {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  return registry.all;
}

FaultChannel* ChannelOf(int device) {
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.of_one_rank.find(device);
  return found == registry.of_one_rank.end() ? nullptr : found->second;
}

}  // namespace

CudaStatus FaultChannel::Open(int device, Calls calls, FaultChannel** channel) {
  auto* opened = new FaultChannel(calls);
  if (CudaStatus status = opened->Allocate(); !status.ok()) {
    delete opened;
    return status;
  }
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.all.emplace_back(device, opened);
  *channel = opened;
  return {};
}

CudaStatus FaultChannel::Allocate() {
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&page_, sizeof(FaultPage), cudaHostAllocMapped | cudaHostAllocPortable));
  *page_ = {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaHostGetDevicePointer(&device_page_, page_, 0));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMalloc(&failed_epoch_, sizeof(uint32_t)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemset(failed_epoch_, 0, sizeof(uint32_t)));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // the memset may return before
  return {};
}

void FaultChannel::NameRanks(std::vector<std::string> names) {
  const std::lock_guard<std::mutex> lock(mutex_);
  names_ = std::move(names);
}

WaitContext FaultChannel::NextCall(int rank, uint64_t deadline_ns) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (++last_epoch_ == 0) ++last_epoch_;
  // Keeps the abort word behind the calls when epochs wrap: its calls are long done by then.
  constexpr uint32_t kFarBehind = 1u << 30;
  uint32_t* abort_epoch = &page_->abort_epoch;
  if (last_epoch_ - *abort_epoch > kFarBehind) {
    __atomic_store_n(abort_epoch, last_epoch_ - kFarBehind, __ATOMIC_RELAXED);
  }
  last_deadline_ns_ = deadline_ns;
  // Not the epoch 0, which failed_epoch holds before there is any.
  const uint32_t num_tied = calls_ == Calls::kTied ? last_epoch_ - 1 : 0;
  return {device_page_, failed_epoch_, deadline_ns, last_epoch_, rank, num_tied};
}

bool FaultChannel::HasFault() const {
  return __atomic_load_n(&page_->record_epoch, __ATOMIC_ACQUIRE) != page_->taken_epoch;
}

std::string FaultChannel::TakeFault() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!HasFault()) return "";
  last_fault_ = Text();
  __atomic_store_n(&page_->taken_epoch, page_->record_epoch, __ATOMIC_RELEASE);
  return last_fault_;
}

std::string FaultChannel::last_fault() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_fault_;
}

bool FaultChannel::ReportFault() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool has_fault = HasFault();
  if (has_fault && reported_epoch_ != page_->record_epoch) {
    reported_epoch_ = page_->record_epoch;
    std::fprintf(stderr, "jax_megamoe: a call has failed, its results are void: %s\n",
                 Text().c_str());
  }
  return has_fault || !last_fault_.empty();
}

void FaultChannel::WarnOfLongWait() {
  const std::lock_guard<std::mutex> lock(mutex_);
  const uint64_t long_wait = __atomic_load_n(&page_->long_wait, __ATOMIC_RELAXED);
  const auto epoch = static_cast<uint32_t>(long_wait >> 32);
  if (epoch == warned_epoch_) return;
  warned_epoch_ = epoch;
  std::fprintf(stderr,
               "jax_megamoe: a call waits for long for %s, epoch %u; it gives up after %llu ms\n",
               NameOf(static_cast<int>(long_wait & 0xffffffff)).c_str(), epoch,
               static_cast<unsigned long long>(last_deadline_ns_ / 1000000));
}

void FaultChannel::AbortWaits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  __atomic_store_n(&page_->abort_epoch, last_epoch_, __ATOMIC_RELAXED);
}

void FaultChannel::EndRank(int rank, const std::string& why) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!ends_.try_emplace(rank, why).second) return;
  __atomic_fetch_or(&page_->ended_ranks, 1u << rank, __ATOMIC_RELAXED);
}

std::string FaultChannel::NameOf(int rank) const {
  const bool has_name = rank >= 0 && static_cast<size_t>(rank) < names_.size();
  return has_name ? names_[rank] : "rank " + std::to_string(rank);
}

std::string FaultChannel::Text() const {
  const FaultRecord& r = page_->record;
  const auto number = [](const char* name, int64_t value) {
    return std::string(", ") + name + " " + std::to_string(value);
  };
  const std::string why =
      r.cause == FaultCause::kAbort ? " was told to stop waiting for " : " gave up waiting for ";
  std::string text = "rank " + std::to_string(r.rank) + why + NameOf(r.peer) + " after " +
                     std::to_string(r.waited_ns / 1000000) + " ms: phase " +
                     kPhaseNames[static_cast<uint32_t>(r.phase)] + number("expert", r.expert) +
                     number("block", r.block) + number("expected flag", r.expected) +
                     number("found", r.found) + number("epoch", r.epoch);
  for (const auto& [_, why] : ends_) text += "; " + why;
  return text;
}

CudaStatus OpenFaultChannel(int device) {
  FaultChannel* channel = nullptr;
  CudaStatus status = FaultChannel::Open(device, FaultChannel::Calls::kAlone, &channel);
  if (!status.ok()) return status;
  Registry& registry = TheRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.of_one_rank[device] = channel;
  return {};
}

WaitContext NextCall(int device, uint64_t deadline_ns) {
  return ChannelOf(device)->NextCall(/*rank=*/0, deadline_ns);
}

std::string TakeFault(int device) {
  FaultChannel* channel = ChannelOf(device);
  return channel == nullptr ? "" : channel->TakeFault();
}

bool AbortWaits(int device) {
  bool is_known = false;
  for (const auto& [of_device, channel] : AllChannels()) {
    if (of_device != device) continue;
    channel->AbortWaits();
    is_known = true;
  }
  return is_known;
}

std::vector<std::string> TakeAllFaults() {
  std::vector<std::string> texts;
  for (const auto& [_, channel] : AllChannels()) {
    if (std::string text = channel->TakeFault(); !text.empty()) texts.push_back(std::move(text));
  }
  return texts;
}

void ReportAllFaults() {
  for (const auto& [_, channel] : AllChannels()) channel->ReportFault();
}

}  // namespace megamoe
