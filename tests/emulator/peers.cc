// Runs the setup of peers, cuda/host/peers.cc, with a thread for each rank and neither GPU nor
// NCCL:
//
//   peers R STEP... [OPTION...]
//
// A STEP is the calls that the ranks make next, joined by "/", each BYTES:CONFIGURATION, or "-" of
// a rank that does not come, or "dies" of the rank that is alone, whose process is killed then. The
// ranks meet between steps. Prints "STEP RANK TEXT" for each call,
// TEXT being "ok EPOCH" or why not. Other steps, of which it prints nothing:
//   kill            the process of the rank that is alone, a child of this one, is killed; the
//                   others get the time to notice
//   sleep:MS        nothing happens for so long
//   refuse:RANK:C   the rank cannot make its next call of configuration C
//   late:RANK:I     a wait in the last call lasts for long, of the I-th workspace of the rank
//   fault:RANK:I    a wait in the last call gives up, of the I-th workspace that the rank has made
// An OPTION says what the machine is like:
//   host=RANK        the rank is on another host     alone=RANK     it is a process of its own
//   deny=RANK        it has no peer access           refuse=RANK    it cannot run
//   memory=BYTES     of each device                  no-nccl        JAX has loaded none
//   deadline=MS      of the setup
//   stall=RANK:I     it comes to its I-th meeting when the others have given it up
//
// The machine ends the program when memory is freed that another rank has open, or is not zero.
#include "host/peers.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "host/identity.h"
#include "shared/fault.h"

namespace {

constexpr int kMaxRanks = megamoe::kMaxRanks;

[[noreturn]] void Fail(const char* text) {
  std::fprintf(stderr, "%s\n", text);
  std::_Exit(1);
}

struct Machine {
  int num_ranks = 0;
  int other_host = -1, alone = -1, denied = -1, refusing = -1;
  size_t memory = size_t{1} << 30;
  size_t deadline_ms = 200;
  int stalling = -1;
  size_t stalls_at = 0;

  uint64_t deadline_ns() const { return deadline_ms * 1'000'000; }
  bool has_nccl = true;
};
Machine machine;

thread_local int my_rank = 0;
thread_local cudaError_t last_error = cudaSuccess;

bool SharesProcess(int a, int b) { return a == b || (a != machine.alone && b != machine.alone); }
bool Reaches(int a, int b) { return a == b || (a != machine.denied && b != machine.denied); }

// The process of the rank that is alone, for who looks at it: it does nothing.
pid_t child = 0;
constexpr auto kNoticeTime = std::chrono::milliseconds(500);

std::mutex mutex;  // of all below

std::vector<megamoe::FaultPage*> pages[kMaxRanks];  // of each rank

struct Allocation {
  int rank;
  size_t bytes;
  int opened;
};
std::map<void*, Allocation> allocations;

// What each rank said in each of its gathers, and where it wants the answers.
struct Said {
  std::string record;
  void* to;
};
std::vector<Said> said[kMaxRanks];
size_t num_answered[kMaxRanks];

cudaError_t Return(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// A rank of its own communicator, so that the library sees different ones.
int communicators[kMaxRanks];
int RankOf(void* communicator) { return static_cast<int*>(communicator) - communicators; }

bool Stalls(int rank) {
  const std::lock_guard<std::mutex> lock(mutex);
  return rank == machine.stalling && said[rank].size() == machine.stalls_at;
}

int FakeAllGather(const void* from, void* to, size_t count, int, void* communicator, cudaStream_t) {
  const int rank = RankOf(communicator);
  if (Stalls(rank)) std::this_thread::sleep_for(std::chrono::milliseconds(3 * machine.deadline_ms));
  const std::lock_guard<std::mutex> lock(mutex);
  said[rank].push_back({{static_cast<const char*>(from), count}, to});
  return megamoe::Nccl::kSuccess;
}
int FakeCount(void*, int* num_ranks) { return *num_ranks = machine.num_ranks, 0; }
int FakeUserRank(void* communicator, int* rank) { return *rank = RankOf(communicator), 0; }
int FakeAsyncError(void*, int* error) { return *error = megamoe::Nccl::kSuccess; }
const char* FakeErrorString(int) { return "an error of NCCL"; }

bool IsAnswered(int rank) {
  const size_t i = num_answered[rank];
  if (i == said[rank].size()) return true;
  for (int other = 0; other < machine.num_ranks; ++other) {
    if (said[other].size() <= i) return false;
  }
  char* to = static_cast<char*>(said[rank][i].to);
  for (int other = 0; other < machine.num_ranks; ++other) {
    const std::string& record = said[other][i].record;
    if (record.size() != said[rank][i].record.size()) Fail("ranks gather different records");
    to = std::copy(record.begin(), record.end(), to);
  }
  ++num_answered[rank];
  return true;
}

}  // namespace

extern "C" {

void* dlopen(const char*, int) noexcept { return machine.has_nccl ? &machine : nullptr; }

void* dlsym(void*, const char* name) noexcept {
  const std::string_view wanted = name;
  if (wanted == "ncclAllGather") return reinterpret_cast<void*>(FakeAllGather);
  if (wanted == "ncclCommCount") return reinterpret_cast<void*>(FakeCount);
  if (wanted == "ncclCommUserRank") return reinterpret_cast<void*>(FakeUserRank);
  if (wanted == "ncclCommGetAsyncError") return reinterpret_cast<void*>(FakeAsyncError);
  return reinterpret_cast<void*>(FakeErrorString);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of CUDA"; }

cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int device) {
  std::snprintf(name, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDeviceGetByPCIBusId(int* device, const char* name) {
  const int rank = std::atoi(name + 5);
  if (!SharesProcess(my_rank, rank)) return Return(cudaErrorInvalidDevice);
  *device = rank;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = Reaches(device, peer);
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  return Return(cudaErrorPeerAccessAlreadyEnabled);  // as where XLA was first
}

cudaError_t cudaMalloc(void** base, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  size_t used = 0;
  for (const auto& [_, allocation] : allocations) {
    if (allocation.rank == my_rank) used += allocation.bytes;
  }
  if (used + bytes > machine.memory) return Return(cudaErrorMemoryAllocation);
  *base = std::malloc(bytes);
  std::memset(*base, 0xff, bytes);
  allocations[*base] = {my_rank, bytes, 0};
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** base, size_t bytes, unsigned) {
  if (bytes != sizeof(megamoe::FaultPage)) Fail("pins what is no fault page");
  const std::lock_guard<std::mutex> lock(mutex);
  *base = std::malloc(bytes);
  pages[my_rank].push_back(static_cast<megamoe::FaultPage*>(*base));
  return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void** to, void* base, unsigned) {
  return *to = base, cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = 4096;
  *total = machine.memory;
  return cudaSuccess;
}
cudaError_t cudaFree(void* base) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = allocations.find(base);
  if (found == allocations.end() || found->second.rank != my_rank) Fail("frees what is not its");
  if (found->second.opened != 0) Fail("frees what a peer has open");
  allocations.erase(found);
  std::free(base);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  std::memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t*, unsigned) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  return IsAnswered(my_rank) ? cudaSuccess : Return(cudaErrorNotReady);
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* base) {
  std::memcpy(handle, &base, sizeof(base));
  return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void** base, cudaIpcMemHandle_t handle, unsigned) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::memcpy(base, &handle, sizeof(*base));
  Allocation& allocation = allocations.at(*base);
  if (SharesProcess(allocation.rank, my_rank)) Fail("opens a handle of its own process");
  if (!Reaches(allocation.rank, my_rank)) return Return(cudaErrorPeerAccessUnsupported);
  ++allocation.opened;
  return cudaSuccess;
}
cudaError_t cudaIpcCloseMemHandle(void* base) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (--allocations.at(base).opened < 0) Fail("closes what it has not open");
  return cudaSuccess;
}

}  // extern "C"

namespace megamoe {

std::string HostName() { return my_rank == machine.other_host ? "there" : "here"; }
uint64_t HostIdentity() { return my_rank == machine.other_host; }
ProcessCard OwnProcess() {
  return my_rank == machine.alone ? CardOf(child, 1) : CardOf(getpid(), 0);
}

}  // namespace megamoe

namespace {

// Every word of every rank is there and zero. The words at the end: they are the own rank's to use.
void CheckMemory(const megamoe::Peers& peers, int64_t bytes) {
  if (peers.bytes < bytes || peers.num_ranks != machine.num_ranks) Fail("the wrong workspace");
  for (int rank = 0; rank < peers.num_ranks; ++rank) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = allocations.find(peers.base[rank]);
    if (found == allocations.end()) Fail("a peer's memory is not there");
    if (found->second.rank != rank) Fail("a peer's memory is another's");
    if (found->second.bytes < static_cast<size_t>(peers.bytes)) Fail("a peer's memory is short");
    for (int64_t i = 0; i < bytes; ++i) {
      if (peers.base[rank][i] != std::byte{0}) Fail("fresh memory is not zero");
    }
  }
}

std::string Call(const std::string& call) {
  const int64_t bytes = std::stoll(call);
  const uint64_t configuration = std::stoull(call.substr(call.find(':') + 1));
  auto& workspace =
      megamoe::PeerWorkspace::Of(communicators + my_rank, /*device=*/my_rank, configuration);
  const std::string refusal = my_rank == machine.refusing ? "it has no Hopper GPU" : "";
  if (std::string why = workspace.Prepare({bytes, machine.deadline_ns(), refusal}); !why.empty())
    return why;
  if (std::string fault = workspace.TakeFault(); !fault.empty()) return fault;
  megamoe::Peers peers;
  megamoe::WaitContext wait;
  if (std::string why = workspace.NextCall(bytes, machine.deadline_ns(), &peers, &wait);
      !why.empty()) {
    return why;
  }
  if (wait.rank != my_rank || wait.num_tied + 1 != wait.epoch) Fail("the wrong waits");
  if (peers.rank != my_rank) return "the wrong rank";
  if (last_error != cudaSuccess) return "an error is left for a later call";
  CheckMemory(peers, bytes);
  return "ok " + std::to_string(peers.epoch);
}

// As comm/wait.cuh leaves it.
void FailCall(int rank, size_t workspace) {
  megamoe::FaultPage& page = *pages[rank].at(workspace);
  page.record = {megamoe::FaultCause::kDeadline,
                 megamoe::Phase::kPeerSums,
                 rank,
                 1 - rank,
                 -1,
                 17,
                 /*expected=*/5,
                 /*found=*/4,
                 /*epoch=*/5,
                 /*waited_ns=*/20'000'000};
  __atomic_store_n(&page.record_epoch, page.record.epoch, __ATOMIC_RELEASE);
}

bool RunOtherStep(const std::string& step) {
  if (step == "kill") {
    kill(child, SIGKILL);
    std::this_thread::sleep_for(kNoticeTime);
    return true;
  }
  int milliseconds = 0;
  if (std::sscanf(step.c_str(), "sleep:%d", &milliseconds) == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    return true;
  }
  int rank = 0, configuration = 0, workspace = 0;
  if (std::sscanf(step.c_str(), "late:%d:%d", &rank, &workspace) == 2) {
    const uint64_t epoch = 5, peer = 1 - rank;
    __atomic_store_n(&pages[rank].at(workspace)->long_wait, epoch << 32 | peer, __ATOMIC_RELAXED);
    return true;
  }
  if (std::sscanf(step.c_str(), "refuse:%d:%d", &rank, &configuration) == 2) {
    megamoe::PeerWorkspace::Of(communicators + rank, rank, configuration)
        .Break("it has its reasons");
    return true;
  }
  if (std::sscanf(step.c_str(), "fault:%d:%d", &rank, &workspace) != 2) return false;
  FailCall(rank, workspace);
  return true;
}

void StartChild() {
  const pid_t parent = getpid();
  child = fork();
  if (child != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  while (getppid() == parent) pause();
  std::_Exit(0);  // the parent had ended before it asked for the signal
}

void RunStep(int index, const std::string& step) {
  if (RunOtherStep(step)) return;
  std::vector<std::string> texts(machine.num_ranks);
  std::vector<std::thread> ranks;
  size_t begin = 0;
  for (int rank = 0; rank < machine.num_ranks; ++rank) {
    const size_t end = std::min(step.find('/', begin), step.size());
    const std::string call = step.substr(begin, end - begin);
    begin = end + 1;
    if (call == "-") continue;
    if (call == "dies") {
      ranks.emplace_back([] {
        std::this_thread::sleep_for(kNoticeTime);  // in which the others come to wait for it
        kill(child, SIGKILL);
      });
      continue;
    }
    ranks.emplace_back([&texts, call, rank] {
      my_rank = rank;
      texts[rank] = Call(call);
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < machine.num_ranks; ++rank) {
    std::printf("%d %d %s\n", index, rank, texts[rank].c_str());
  }
}

bool ReadOption(const std::string& text) {
  if (std::sscanf(text.c_str(), "stall=%d:%zu", &machine.stalling, &machine.stalls_at) == 2) {
    return true;
  }
  const size_t equals = text.find('=');
  const std::string name = text.substr(0, equals);
  const size_t value = equals == std::string::npos ? 0 : std::stoull(text.substr(equals + 1));
  if (name == "no-nccl") return machine.has_nccl = false, true;
  if (name == "deadline") return machine.deadline_ms = value, true;
  if (name == "memory") return machine.memory = value, true;
  const std::map<std::string, int*> of_rank = {{"host", &machine.other_host},
                                               {"alone", &machine.alone},
                                               {"deny", &machine.denied},
                                               {"refuse", &machine.refusing}};
  const auto found = of_rank.find(name);
  if (found == of_rank.end()) return false;
  *found->second = static_cast<int>(value);
  return true;
}

}  // namespace

int main(int count, char** arguments) {
  machine.num_ranks = std::atoi(arguments[1]);
  std::vector<std::string> steps;
  for (int i = 2; i < count; ++i) {
    if (!ReadOption(arguments[i])) steps.push_back(arguments[i]);
  }
  if (machine.alone >= 0) StartChild();
  for (size_t i = 0; i < steps.size(); ++i) RunStep(static_cast<int>(i), steps[i]);
}
