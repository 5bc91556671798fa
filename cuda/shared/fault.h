// What a wait that gave up leaves behind, and how device and host share it.
#pragma once

#include <cstdint>

namespace megamoe {

// Which work a wait waits for; kPhaseNames has its word for the error text.
enum class Phase : uint32_t {
  kProbe,
  kDispatch,
  kGateUp,
  kDown,
  kDgradDown,
  kDgradGateUp,
  kPeerInputs,
  kPeerSums
};
constexpr const char* kPhaseNames[] = {"probe",      "dispatch",      "gate_up",     "down",
                                       "dgrad_down", "dgrad_gate_up", "peer_inputs", "peer_sums"};

enum class FaultCause : uint32_t { kDeadline, kAbort };

struct FaultRecord {
  FaultCause cause;
  Phase phase;
  int32_t rank;    // the one that waited
  int32_t peer;    // the one it waited for
  int32_t expert;  // what it waited for, -1 where it does not apply
  int32_t block;
  uint32_t expected;  // value of the flag
  uint32_t found;
  uint32_t epoch;  // of the call; calls of a channel are numbered from 1 and wrap
  uint64_t waited_ns;
};

// In pinned host memory, one for each channel of host/fault.h: for the calls of one rank on a
// device, and for those of a rank in a group.
struct FaultPage {
  // Written by the host, relaxed; polled by waits. Calls up to this epoch give up. Never reset.
  uint32_t abort_epoch;
  // Likewise, a bit for each rank whose process has ended: waits for it give up. Never reset.
  uint32_t ended_ranks;
  // Written by the device after `record`, release at system scope; read by the host, acquire. The
  // epoch of the record, so never 0 once there was one. Never reset.
  uint32_t record_epoch;
  // Written by the host when it has read the record, release; the device writes no record before
  // this equals record_epoch: the first fault is kept, later ones follow from it.
  uint32_t taken_epoch;
  // Written by waits that last for long, again and again, any of them: the epoch of the call in the
  // upper half, the rank waited for in the lower. Read by the host, which warns. Never reset.
  uint64_t long_wait;
  FaultRecord record;
};

// What the waits of one call need, passed to its kernels by value.
struct WaitContext {
  FaultPage* page;  // device address
  // In device memory, one for the channel, whose calls run one at a time, since XLA has one stream
  // for those of a device: the epoch of the last call whose wait gave up. Written by the first
  // thread that gives up; polled by the other waits of the call, which then give up without a
  // record.
  uint32_t* failed_epoch;
  uint64_t deadline_ns;  // of each wait, from its start
  uint32_t epoch;
  int32_t rank;
  // How many calls before this one make it fail when they have: none, or in a group, which is out
  // of step from then on, all. So what is enqueued behind a call that failed does not wait in vain
  // to deadlines of its own.
  uint32_t num_tied;
};

}  // namespace megamoe
