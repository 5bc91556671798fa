// Bounded waits: the only way in which a kernel of this library waits for a flag or a barrier. None
// lasts for ever, whatever happened to the one that it waits for.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"
#include "shared/fault.h"

namespace megamoe {

struct WaitSite {
  Phase phase;
  int32_t peer, expert, block;
};

// A counter of this GPU that reaches `expected` when the work of `phase` is done.
struct Flag {
  const uint32_t* counter;
  uint32_t expected;
  Phase phase;
};

// Flags are epochs and counts that only grow and may wrap.
__device__ inline bool Reached(uint32_t found, uint32_t expected) {
  return static_cast<int32_t>(found - expected) >= 0;
}

// Acquires what the writers of the flag released.
__device__ __forceinline__ bool IsRaised(const Flag& flag) {
  return Reached(ptx::LoadAcquire(flag.counter), flag.expected);
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

// Whether a wait that has lasted since start_ns has to give up: its deadline has passed, the host
// has set the abort word, or another wait of the call gave up. Writes the record of the first.
//
// The abort word lies across PCIe, about 1 us away: look once in so many polls.
constexpr int kPollsPerLook = 64;
__device__ inline bool GivesUp(const WaitContext& context, const WaitSite& site, uint32_t expected,
                               uint32_t found, uint64_t start_ns) {
  if (ptx::LoadRelaxed(context.failed_epoch) == context.epoch) return true;
  const uint64_t waited_ns = ptx::GlobalTimerNs() - start_ns;
  const bool aborted = Reached(ptx::LoadRelaxedSystem(&context.page->abort_epoch), context.epoch);
  if (!aborted && waited_ns <= context.deadline_ns) return false;
  const FaultCause cause = aborted ? FaultCause::kAbort : FaultCause::kDeadline;
  RecordFault(context, site, cause, expected, found, waited_ns);
  return true;
}

// Waits, with one thread, until poll() reaches `expected`; poll acquires what the writer of the
// flag released. Returns false when the wait gave up; the caller then leaves and lets its
// dependents do the same.
//
// Cost: one poll when the flag is there.
template <typename Poll>
__device__ inline bool BoundedWait(Poll poll, uint32_t expected, const WaitContext& context,
                                   const WaitSite& site) {
  uint32_t found = poll();
  if (Reached(found, expected)) return true;
  const uint64_t start_ns = ptx::GlobalTimerNs();
  while (true) {
#pragma unroll 1
    for (int i = 0; i < kPollsPerLook; ++i) {
      __nanosleep(32);
      found = poll();
      if (Reached(found, expected)) return true;
    }
    if (GivesUp(context, site, expected, found, start_ns)) return false;
  }
}

// Waits for a phase of a barrier in shared memory. Returns false when a wait of the call has given
// up, since whoever should arrive may have left; what the caller does then ends up in no result.
__device__ __forceinline__ bool BarrierWait(uint32_t barrier, uint32_t parity,
                                            const WaitContext& context) {
  return ptx::BarrierWaitUnless(barrier, parity, context.failed_epoch, context.epoch);
}

// Lets copies land that a role has on their way when it stops early: the blocks of a cluster end
// together (ptx::ClusterSync), and nothing may be written to them afterwards.
__device__ __forceinline__ void LetCopiesLand() { __nanosleep(100000); }

}  // namespace megamoe
