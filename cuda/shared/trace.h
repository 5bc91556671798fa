// What a call that is asked for a trace records: when each piece of a kernel's work ran, for a
// picture of its timeline, and what its rank moved over NVLink.
#pragma once

#include <cstdint>

#include "shared/problem.h"

namespace megamoe {

// One piece of work. Times are the low words of the GPU's global timer.
struct alignas(16) TraceRecord {
  uint32_t start_ns;
  uint32_t end_ns;
  uint32_t multiprocessor;
  uint32_t kind;  // a Part (shared/part.h) or kTraceShare, with the bits below
};
// The wait before a piece: of the load warp for its operands, of a share for the inputs of the
// peers, of finish for their sums.
constexpr uint32_t kTraceWait = 16;
// The piece comes from a peer, or goes to one.
constexpr uint32_t kTraceOfPeer = 1024;
// A block of the kernel that shares the inputs.
constexpr uint32_t kTraceShare = 2048;

// Bytes of a call's payload that crossed to or from other ranks, counted where they are moved. Of
// the type that atomicAdd takes.
struct alignas(16) PeerTraffic {
  unsigned long long inputs_read;   // rows of x and dy
  unsigned long long sums_sent;     // rows of PeerArrays::sums
  unsigned long long dw_sent;       // PeerArrays::dw
  unsigned long long routing_sent;  // expert_idx and expert_weight
  unsigned long long flags_sent;    // inputs_done and sums_done
};

// In device memory: records[0].start_ns counts the records behind it; it and the traffic are zero
// before the first launch. Written with atomics by whoever finishes a piece, read by the host after
// the kernel. Records that do not fit are counted and dropped.
struct TraceBuffer {
  TraceRecord* records;  // [1 + capacity], with several ranks then PeerTraffic; null: no trace
  uint32_t capacity;

  MEGAMOE_HOST_DEVICE PeerTraffic* traffic() const {
    return reinterpret_cast<PeerTraffic*>(records + 1 + capacity);
  }
};
// The rows of a trace that it takes.
constexpr uint32_t kTrafficRecords = sizeof(PeerTraffic) / sizeof(TraceRecord);

}  // namespace megamoe
