// The record of when each piece of a kernel's work ran, for a picture of its timeline.
#pragma once

#include <cstdint>

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

// In device memory: records[0].start_ns counts the records behind it; zero before the first launch.
// Written with atomics by whoever finishes a piece, read by the host after the kernel. What does
// not fit is counted and dropped.
struct TraceBuffer {
  TraceRecord* records;  // [1 + capacity]; null: nothing is recorded
  uint32_t capacity;
};

}  // namespace megamoe
