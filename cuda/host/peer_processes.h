// The processes of the ranks of an expert group, and what follows when one of them ends.
#pragma once

#include <chrono>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "host/fault.h"
#include "host/peer_records.h"

namespace megamoe {

// Of one rank of a communicator, whose workspaces share it: processes outlive none of them.
//
// When a process has ended, waits for its ranks give up within milliseconds, and the group is over:
// no later call or setup begins. Waits for other ranks go on for kGrace, in which one that has got
// what it needs ends its call as ever: a process may end its part and leave before the others.
// Thread-safe.
class PeerProcesses {
 public:
  // Of the communicator, an ncclComm_t. Never destroyed.
  static PeerProcesses& Of(void* communicator);

  // Begins to watch the processes of the ranks with these cards, `rank` being the own one's. Only
  // the first call does anything, and only for ranks of other processes.
  void Watch(const std::vector<PeerCard>& cards, int rank);

  // Ends the waits of this channel's calls, too, from now on. It learns the names of the ranks.
  void Add(FaultChannel* channel);

  // Which ranks' processes have ended, or "".
  std::string Loss() const;

 private:
  static constexpr std::chrono::milliseconds kGrace{5000};
  // When a fault has waited this long to be raised, it is reported: the host may wait for a
  // collective with the process that has ended, and then comes to no next call.
  static constexpr std::chrono::milliseconds kReport{3000};
  static constexpr std::chrono::milliseconds kLast{60000};

  PeerProcesses() = default;

  void LookAtWaits();
  void EndProcess(uint64_t identity);
  std::string EndOf(int rank) const;
  bool OnEnded(uint64_t identity, std::chrono::milliseconds since);

  mutable std::mutex mutex_;  // of all below
  std::vector<PeerCard> cards_;
  std::vector<std::string> names_;
  std::set<int> ended_ranks_;
  std::vector<FaultChannel*> channels_;
};

}  // namespace megamoe
