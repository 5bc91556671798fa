#include "host/peers.h"

#include <cuda_runtime_api.h>

#include <chrono>
#include <map>
#include <memory>
#include <thread>
#include <tuple>

#include "host/identity.h"

namespace megamoe {
namespace {

// The granularity of the driver: a handle for other processes is one of whole pages.
constexpr int64_t kPageBytes = 2 << 20;
// For which a refusal waits for the record of the call that has failed by the same cause.
constexpr auto kFaultDelay = std::chrono::milliseconds(200);

int64_t WholePages(int64_t bytes) { return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

PeerReport ReportOf(const CudaStatus& status) {
  PeerReport report = {};
  if (status.ok()) return report;
  (void)cudaGetLastError();  // would be the error of a later call
  report.fault = PeerFault::kCuda;
  CopyText(status.text(), report.text, sizeof(report.text));
  return report;
}

// The ordinal here of the device with this name, or -1 where the process does not see it.
int FindDevice(const char* pci_bus) {
  int device = 0;
  if (cudaDeviceGetByPCIBusId(&device, pci_bus) == cudaSuccess) return device;
  (void)cudaGetLastError();
  return -1;
}

CudaStatus EnablePeerAccess(int device) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();  // would be the error of a later call
    return {};
  }
  return {error, "cudaDeviceEnablePeerAccess"};
}

// The ranks of this process that wait for others of it: of those others' memory, the channels of
// who waits for them. Never destroyed.
struct Waiting {
  std::mutex mutex;
  std::multimap<const std::byte*, FaultChannel*> channels;
};
Waiting& TheWaiting() {
  static auto* waiting = new Waiting;
  return *waiting;
}

std::string OutOfStep(const std::string& reason) {
  return "the GPUs of an expert group are out of step, and their processes have to start again, " +
         ("since an earlier call failed: " + reason);
}

}  // namespace

PeerWorkspace& PeerWorkspace::Of(void* communicator, int device, uint64_t configuration) {
  using Key = std::tuple<void*, int, uint64_t>;
  static std::mutex mutex;
  static auto* all = new std::map<Key, std::unique_ptr<PeerWorkspace>>;  // kernels outlive main
  const std::lock_guard<std::mutex> lock(mutex);
  auto& workspace = (*all)[{communicator, device, configuration}];
  if (!workspace) workspace.reset(new PeerWorkspace(communicator, device, configuration));
  return *workspace;
}

std::string PeerWorkspace::Prepare(const PeerRequest& request) {
  const std::lock_guard<std::mutex> lock(mutex_);
  // Where nothing is to be done the execute stage refuses: other ranks of this process may wait for
  // this one to come through its initialize stage, in XLA, before they come to theirs.
  if (agreed_bytes_.count(request.bytes) > 0) return "";
  if (std::string why = Refusal(); !why.empty()) return why;
  if (std::string why = exchange_.Open(communicator_); !why.empty()) return why;
  deadline_ns_ = request.deadline_ns;
  std::string why = Agree(request);
  if (peers_.bytes == 0) agreed_bytes_.clear();
  if (why.empty()) agreed_bytes_.insert(request.bytes);
  return why;
}

std::string PeerWorkspace::NextCall(int64_t bytes, uint64_t deadline_ns, Peers* peers,
                                    WaitContext* wait) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (std::string why = Refusal(); !why.empty()) return why;
  if (bytes > peers_.bytes) {
    return "a call with a workspace of " + std::to_string(bytes) +
           " bytes was not prepared: " + std::to_string(peers_.bytes) + " bytes are there";
  }
  ++peers_.epoch;
  *peers = peers_;
  *wait = channel_->NextCall(peers_.rank, deadline_ns);
  return "";
}

std::string PeerWorkspace::TakeFault() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (channel_ == nullptr) return "";
  std::string fault = channel_->TakeFault();
  if (fault.empty() && broken_.empty() && !processes_.Loss().empty()) {
    // That a process has ended is known before the waits for it have given up, which can say more.
    std::this_thread::sleep_for(kFaultDelay);
    fault = channel_->TakeFault();
  }
  if (!fault.empty()) End(OutOfStep(fault));
  return fault;
}

std::string PeerWorkspace::Refusal() {
  const std::string fault = channel_ == nullptr ? "" : channel_->last_fault();
  if (!fault.empty()) End(OutOfStep(fault));
  const std::string loss = processes_.Loss();
  if (!loss.empty()) End(loss + "; the processes of its expert group have to start again");
  return broken_;
}

Exchange::Patience PeerWorkspace::patience() const {
  return {deadline_ns_, [this] { return processes_.Loss(); }};
}

void PeerWorkspace::Break(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(mutex_);
  End(OutOfStep(reason));
}

// The first reason is the one that stays.
void PeerWorkspace::End(const std::string& reason) {
  if (!broken_.empty()) return;
  broken_ = reason;
  const std::string why =
      "rank " + std::to_string(peers_.rank) + " makes no more calls: " + broken_;
  Waiting& waiting = TheWaiting();
  const std::lock_guard<std::mutex> lock(waiting.mutex);
  const auto [begin, end] = waiting.channels.equal_range(peers_.base[peers_.rank]);
  for (auto i = begin; i != end; ++i) i->second->EndRank(peers_.rank, why);
}

void PeerWorkspace::ListenToRanksHere() {
  Waiting& waiting = TheWaiting();
  const std::lock_guard<std::mutex> lock(waiting.mutex);
  for (int peer = 0; peer < peers_.num_ranks; ++peer) {
    if (peer != peers_.rank && !opened_[peer]) {
      waiting.channels.emplace(peers_.base[peer], channel_);
    }
  }
}

std::string PeerWorkspace::Agree(const PeerRequest& request) {
  PeerCard card = {};
  if (CudaStatus status = MakeCard(request, &card); !status.ok()) {
    CopyText(status.text(), card.refusal, sizeof(card.refusal));
  }
  if (std::string why = exchange_.Gather(card, patience(), &cards_); !why.empty()) {
    return broken_ = why;
  }
  if (std::string why = Disagreement(cards_); !why.empty()) return why;
  processes_.Watch(cards_, exchange_.rank());
  return MustGrow(cards_) ? Make(request.bytes) : "";
}

CudaStatus PeerWorkspace::MakeCard(const PeerRequest& request, PeerCard* card) const {
  card->bytes = request.bytes;
  card->capacity = peers_.bytes;
  card->configuration = configuration_;
  card->process = OwnProcess();
  card->host = HostIdentity();
  CopyText(HostName(), card->host_name, sizeof(card->host_name));
  CopyText(request.refusal, card->refusal, sizeof(card->refusal));
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetPCIBusId(card->pci_bus, sizeof(card->pci_bus), device_));
  return {};
}

// Nothing of this device runs while its memory or its mappings change: to allocate beside a kernel
// that waits for a peer can block the driver, and with it the peer.
std::string PeerWorkspace::Make(int64_t bytes) {
  if (std::string why = Leave(); !why.empty()) return why;
  if (std::string why = Meet(Allocate(bytes)); !why.empty()) {
    // No rank has opened anything yet.
    const CudaStatus status = Free();
    return status.ok() ? why : why + "; " + status.text();
  }
  if (std::string why = Meet(ReachAll()); !why.empty()) {
    // Who has not come yet would take the next meeting for this one.
    if (!broken_.empty()) return why;
    const std::string also = Leave();
    return also.empty() ? why : why + "; " + also;
  }
  peers_.bytes = WholePages(bytes);
  peers_.rank = exchange_.rank();
  peers_.num_ranks = exchange_.num_ranks();
  ListenToRanksHere();
  return "";
}

// Gives up the workspace, if there is one, on all ranks: none is freed while a kernel may use it or
// a rank has it open.
std::string PeerWorkspace::Leave() {
  peers_.bytes = 0;
  peers_.epoch = 0;
  if (std::string why = Meet(ReportOf(CloseAll())); !why.empty()) return why;
  const CudaStatus status = Free();
  return status.ok() ? "" : broken_ = status.text();
}

CudaStatus PeerWorkspace::CloseAll() {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
  for (int peer = 0; peer < kMaxRanks; ++peer) {
    if (!opened_[peer]) continue;
    opened_[peer] = false;
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaIpcCloseMemHandle(peers_.base[peer]));
  }
  return {};
}

CudaStatus PeerWorkspace::Free() {
  std::byte*& own = peers_.base[exchange_.rank()];
  if (own == nullptr) return {};
  {
    Waiting& waiting = TheWaiting();
    const std::lock_guard<std::mutex> lock(waiting.mutex);
    waiting.channels.erase(own);
  }
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFree(own));
  own = nullptr;
  return {};
}

// Tells all ranks how this one came through a step. Returns the fault of the first that had one.
std::string PeerWorkspace::Meet(const PeerReport& mine) {
  if (std::string why = exchange_.Gather(mine, patience(), &reports_); !why.empty()) {
    return broken_ = why;
  }
  return FirstFault(cards_, reports_);
}

PeerReport PeerWorkspace::Allocate(int64_t bytes) {
  PeerReport report = {};
  for (int peer = 0; peer < exchange_.num_ranks(); ++peer) {
    // Of a device that this process does not see, the driver says it when its memory is opened.
    const int device = FindDevice(cards_[peer].pci_bus);
    if (device < 0 || device == device_) continue;
    int can_access = 0;
    const cudaError_t error = cudaDeviceCanAccessPeer(&can_access, device_, device);
    if (error != cudaSuccess) return ReportOf({error, "cudaDeviceCanAccessPeer"});
    if (can_access != 0) continue;
    report.fault = PeerFault::kNoAccess;
    report.peer = peer;
    return report;
  }
  CudaStatus status = AllocateZeros(bytes, &report);
  if (status.ok() && report.fault == PeerFault::kNone) status = OpenChannel();
  return status.ok() ? report : ReportOf(status);
}

CudaStatus PeerWorkspace::OpenChannel() {
  if (channel_ != nullptr) return {};
  CudaStatus status = FaultChannel::Open(device_, FaultChannel::Calls::kTied, &channel_);
  if (status.ok()) processes_.Add(channel_);
  return status;
}

CudaStatus PeerWorkspace::AllocateZeros(int64_t bytes, PeerReport* report) {
  const int64_t size = WholePages(bytes);
  void* base = nullptr;
  const cudaError_t error = cudaMalloc(&base, size);
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    size_t free = 0, total = 0;
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemGetInfo(&free, &total));
    report->fault = PeerFault::kNoMemory;
    report->bytes_needed = size;
    report->bytes_free = static_cast<int64_t>(free);
    return {};
  }
  if (error != cudaSuccess) return {error, "cudaMalloc"};
  peers_.base[exchange_.rank()] = static_cast<std::byte*>(base);
  report->base = reinterpret_cast<uint64_t>(base);
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemset(base, 0, size));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(nullptr));  // the memset may return before
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaIpcGetMemHandle(&report->handle, base));
  return {};
}

PeerReport PeerWorkspace::ReachAll() {
  PeerReport report = {};
  for (int peer = 0; peer < exchange_.num_ranks() && report.fault == PeerFault::kNone; ++peer) {
    if (peer == exchange_.rank()) continue;
    const CudaStatus status = Reach(peer, &report);
    if (!status.ok()) report = ReportOf(status);
  }
  return report;
}

CudaStatus PeerWorkspace::Reach(int peer, PeerReport* report) {
  const PeerCard& card = cards_[peer];
  if (card.process.identity == cards_[exchange_.rank()].process.identity) {
    peers_.base[peer] = reinterpret_cast<std::byte*>(reports_[peer].base);
    return EnablePeerAccess(FindDevice(card.pci_bus));
  }
  void* base = nullptr;
  const cudaError_t error =
      cudaIpcOpenMemHandle(&base, reports_[peer].handle, cudaIpcMemLazyEnablePeerAccess);
  if (error == cudaErrorPeerAccessUnsupported) {
    (void)cudaGetLastError();
    report->fault = PeerFault::kNoAccess;
    report->peer = peer;
    return {};
  }
  if (error != cudaSuccess) return {error, "cudaIpcOpenMemHandle"};
  peers_.base[peer] = static_cast<std::byte*>(base);
  opened_[peer] = true;
  return {};
}

}  // namespace megamoe
