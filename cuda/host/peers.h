// The memory by which the GPUs of an expert group reach each other.
#pragma once

#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "host/exchange.h"
#include "host/fault.h"
#include "host/peer_processes.h"
#include "host/peer_records.h"
#include "shared/cuda_status.h"
#include "shared/fault.h"
#include "shared/peers.h"

namespace megamoe {

struct PeerRequest {
  int64_t bytes;         // of each rank
  uint64_t deadline_ns;  // for the other ranks to come
  std::string refusal;   // why this rank cannot take part, or ""; all ranks raise it
};

// The workspace of one rank in one group of ranks, for the calls of one configuration, and its view
// of those of its peers. One thread of the rank uses it at a time; thread-safe all the same.
//
// What happens is the same on all ranks, since all take part in each setup and judge the same
// records. The memory lies outside XLA's share and stays for the process or until it must grow.
// Then the device is drained, and no rank frees before all have closed what they had open of
// others. In the end nothing is closed: the driver ends the mappings with the process.
class PeerWorkspace {
 public:
  // The workspace of (communicator, device, configuration). The communicator is an ncclComm_t of
  // XLA, which keeps it for the process; `configuration` is a hash of what the ranks have to agree
  // on. Never destroyed.
  static PeerWorkspace& Of(void* communicator, int device, uint64_t configuration);

  // The initialize stage, with the device as CUDA's current one. "" or why not. Costs a look-up
  // when the ranks have agreed on as many bytes before; else all ranks meet here, and those that
  // are there wait for the others, until the deadline or until one's process has ended.
  std::string Prepare(const PeerRequest& request);

  // The execute stage, first: the record of an earlier call that failed, once, or "". Every later
  // call is refused then.
  std::string TakeFault();

  // The execute stage: a call of as many bytes as were prepared. Counts the call, so that epochs
  // agree when all ranks make the same calls in the same order. "" and what its kernels take, or
  // why not.
  std::string NextCall(int64_t bytes, uint64_t deadline_ns, Peers* peers, WaitContext* wait);

  // A call was not made on this rank: its epochs are no longer those of its peers, and every later
  // call is refused with the reason. The ranks of this process do not wait for it any more, as in
  // all cases in which this one's calls are over; those of others do, to their deadline, or until
  // its process ends by the error.
  void Break(const std::string& reason);

 private:
  PeerWorkspace(void* communicator, int device, uint64_t configuration)
      : communicator_(communicator),
        device_(device),
        configuration_(configuration),
        processes_(PeerProcesses::Of(communicator)) {}

  std::string Refusal();
  void End(const std::string& reason);
  void ListenToRanksHere();
  Exchange::Patience patience() const;
  std::string Agree(const PeerRequest& request);
  std::string Make(int64_t bytes);
  std::string Leave();
  std::string Meet(const PeerReport& mine);
  CudaStatus MakeCard(const PeerRequest& request, PeerCard* card) const;
  CudaStatus CloseAll();
  CudaStatus Free();
  PeerReport Allocate(int64_t bytes);
  CudaStatus OpenChannel();
  CudaStatus AllocateZeros(int64_t bytes, PeerReport* report);
  PeerReport ReachAll();
  CudaStatus Reach(int peer, PeerReport* report);

  void* const communicator_;
  const int device_;
  const uint64_t configuration_;
  PeerProcesses& processes_;

  std::mutex mutex_;  // of all below
  std::string broken_;
  Exchange exchange_;
  FaultChannel* channel_ = nullptr;  // opened with the first workspace
  uint64_t deadline_ns_ = 0;         // of the setup that is going on
  std::vector<PeerCard> cards_;
  std::vector<PeerReport> reports_;
  std::set<int64_t> agreed_bytes_;
  bool opened_[kMaxRanks] = {};  // by IPC
  Peers peers_ = {};             // bytes is 0 while there is no workspace
};

}  // namespace megamoe
