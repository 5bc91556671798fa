// The parts of a kernel's work.
#pragma once

#include <cstdint>

namespace megamoe {

// Which parts one launch does. All of a pass are its kernel; one at a time is the unfused baseline
// out of the same code. A trace names its records by these numbers, so no two passes share one that
// means different things; 16 is kTraceWait (shared/trace.h).
enum Part : uint32_t {
  kDispatch = 1,
  kGateUp = 2,
  kDown = 4,
  kCombine = 8,
  kDgradDown = 32,
  kDgradGateUp = 64,
  kWgradDown = 128,
  kWgradGateUp = 256,
  kFinish = 512,
};

}  // namespace megamoe
