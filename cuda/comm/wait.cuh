// The bounded wait: the only way in which a kernel of this library waits for a peer.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"
#include "shared/fault.h"

namespace megamoe {

struct WaitSite {
  Phase phase;
  int32_t peer, expert, block;
};

// Flags are epochs that only grow and may wrap.
__device__ inline bool Reached(uint32_t found, uint32_t expected) {
  return static_cast<int32_t>(found - expected) >= 0;
}

// Writes the record of the call, unless another thread of the call did or an earlier record still
// waits for the host.
__device__ inline void RecordFault(const WaitContext& context, const WaitSite& site,
                                   FaultCause cause, uint32_t expected, uint32_t found,
                                   uint64_t waited_ns) {
  if (atomicExch(context.failed_epoch, context.epoch) == context.epoch) return;
  FaultPage* page = context.page;
  if (ptx::LoadAcquireSystem(&page->taken_epoch) != page->record_epoch) return;
  page->record = {cause,      site.phase, context.rank, site.peer,     site.expert,
                  site.block, expected,   found,        context.epoch, waited_ns};
  ptx::StoreReleaseSystem(&page->record_epoch, context.epoch);
}

// Waits, with one thread, until *flag reaches `expected`, and acquires what its writer released at
// system scope. Returns false when the deadline has passed, the host has set the abort word, or
// another wait of this call gave up; the caller then leaves and lets its dependents do the same.
//
// released by: the peer named in `site`. Cost: one load when the flag is there.
__device__ inline bool BoundedWait(const uint32_t* flag, uint32_t expected,
                                   const WaitContext& context, const WaitSite& site) {
  // The abort word lies across PCIe, about 1 us away: look at it once in so many polls.
  constexpr int kPollsPerLook = 64;
  uint32_t found = ptx::LoadAcquireSystem(flag);
  if (Reached(found, expected)) return true;
  const uint64_t start_ns = ptx::GlobalTimerNs();
  while (true) {
    for (int i = 0; i < kPollsPerLook; ++i) {
      found = ptx::LoadAcquireSystem(flag);
      if (Reached(found, expected)) return true;
    }
    if (ptx::LoadRelaxedSystem(context.failed_epoch) == context.epoch) return false;
    const uint64_t waited_ns = ptx::GlobalTimerNs() - start_ns;
    const bool aborted = Reached(ptx::LoadRelaxedSystem(&context.page->abort_epoch), context.epoch);
    if (aborted || waited_ns > context.deadline_ns) {
      const FaultCause cause = aborted ? FaultCause::kAbort : FaultCause::kDeadline;
      RecordFault(context, site, cause, expected, found, waited_ns);
      return false;
    }
  }
}

}  // namespace megamoe
