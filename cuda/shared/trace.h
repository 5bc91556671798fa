// The record of when each piece of a kernel's work ran, for a picture of its timeline.
#pragma once

#include <cstdint>

namespace megamoe {

// One piece of work. Times are the low words of the GPU's global timer.
struct alignas(16) TraceRecord {
  uint32_t start_ns;
  uint32_t end_ns;
  uint32_t multiprocessor;
  uint32_t kind;  // a Part (shared/part.h), with kTraceWait for the load warp's wait before it
};
constexpr uint32_t kTraceWait = 16;

// In device memory: records[0].start_ns counts the records behind it; zero before the first launch.
// Written with atomics by whoever finishes a piece, read by the host after the kernel. What does
// not fit is counted and dropped.
struct TraceBuffer {
  TraceRecord* records;  // [1 + capacity]; null: nothing is recorded
  uint32_t capacity;
};

}  // namespace megamoe
