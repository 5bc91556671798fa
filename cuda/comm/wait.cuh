// Bounded waits: the only way in which a kernel of this library waits for a flag. None lasts for
// ever, whatever happened to the one that it waits for.
//
// When one gives up, so does every later one of the call, and each role goes on with its work on
// whatever memory holds: addresses come from the plan, which is complete, if of no routes where
// those did not come. So nothing inside a block ever waits in vain, and a wait for an mbarrier
// needs no bound: one that looked for a failure cost the forward 2 % on an H200. The results are
// garbage that the error keeps anyone from using; peers are told of none.
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

// Whether a wait of the call has given up, or of one to which it is tied.
__device__ __forceinline__ bool HasFailed(const WaitContext& context) {
  return context.epoch - ptx::LoadRelaxed(context.failed_epoch) <= context.num_tied;
}

// Whether the host wants no more waits in the call, or none for this peer.
__device__ __forceinline__ bool IsToldToStop(const WaitContext& context, int peer) {
  const uint32_t ended_ranks = ptx::LoadRelaxedSystem(&context.page->ended_ranks);
  return (ended_ranks >> peer & 1) != 0 ||
         Reached(ptx::LoadRelaxedSystem(&context.page->abort_epoch), context.epoch);
}

// One store, which needs no order: it says all that it has to.
__device__ inline void TellOfLongWait(const WaitContext& context, int peer) {
  context.page->long_wait = uint64_t{context.epoch} << 32 | static_cast<uint32_t>(peer);
}

// Decides, for one wait, when to give up. Looked at once in so many polls, by one thread.
//
// What the host says lies across PCIe: over a thousand warps may wait at once, and if each read it
// after every few polls, the reads would queue for longer than the wait. A wait of usual length
// never reads it.
class Patience {
 public:
  static constexpr int kPollsPerLook = 64;

  // True when the deadline has passed, the host says so, or another wait of the call gave up.
  // Writes the record of the first.
  __device__ inline bool IsOver(const WaitContext& context, const WaitSite& site, uint32_t expected,
                                uint32_t found) {
    if (HasFailed(context)) return true;
    const uint64_t waited_ns = ptx::GlobalTimerNs() - start_ns_;
    bool aborted = false;
    if (waited_ns > next_look_ns_) {
      next_look_ns_ = waited_ns + kLookNs;
      aborted = IsToldToStop(context, site.peer);
      if (waited_ns > min(kLongNs, context.deadline_ns / 4)) TellOfLongWait(context, site.peer);
    }
    if (!aborted && waited_ns <= context.deadline_ns) return false;
    const FaultCause cause = aborted ? FaultCause::kAbort : FaultCause::kDeadline;
    RecordFault(context, site, cause, expected, found, waited_ns);
    return true;
  }

 private:
  static constexpr uint64_t kLookNs = 10'000'000;
  static constexpr uint64_t kLongNs = 60'000'000'000;

  const uint64_t start_ns_ = ptx::GlobalTimerNs();
  uint64_t next_look_ns_ = kLookNs;
};

// Waits, with a whole warp, until what poll() finds reaches `expected` in every lane that `waits`;
// poll acquires what the writer of the flag released. Returns false when the wait gave up.
//
// Cost: one poll when the flags are there. pause_ns: between polls; short where a product waits.
template <typename Poll>
__device__ inline bool BoundedWait(bool waits, Poll poll, uint32_t expected, uint32_t pause_ns,
                                   const WaitContext& context, const WaitSite& site) {
  uint32_t found = waits ? poll() : expected;
  unsigned late = __ballot_sync(kAllLanes, !Reached(found, expected));
  if (late == 0) return true;
  Patience patience;
  for (int polls = 1;; ++polls) {
    __nanosleep(pause_ns);
    if (waits) found = poll();
    late = __ballot_sync(kAllLanes, !Reached(found, expected));
    if (late == 0) return true;
    if (polls % Patience::kPollsPerLook != 0) continue;
    bool is_over = false;
    if (threadIdx.x % kWarpThreads == __ffs(late) - 1) {
      is_over = patience.IsOver(context, site, expected, found);
    }
    if (__any_sync(kAllLanes, is_over)) return false;
  }
}

// BoundedWait for flags of this GPU, one for each lane that `waits`: the work of tile `tile`, of
// `expert` or -1 where the lanes wait for several. The caller goes on whether they came or not.
__device__ inline void WaitForFlags(bool waits, const Flag& flag, uint32_t pause_ns,
                                    const WaitContext& context, int expert, int tile) {
  const WaitSite site = {flag.phase, context.rank, expert, tile};
  const auto poll = [&] { return ptx::LoadAcquire(flag.counter); };
  BoundedWait(waits, poll, flag.expected, pause_ns, context, site);
}

}  // namespace megamoe
