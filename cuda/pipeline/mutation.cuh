// Whether the kernel has a seeded fault: a test build (MEGAMOE_FAULTS) is told which one between
// calls. Other builds have none, and no code here.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "pipeline/seeded_faults.h"

namespace megamoe {

#ifdef MEGAMOE_FAULTS

// The number of a SeededFault. Written by the host between calls, constant during one.
static __constant__ uint32_t seeded_fault;

__device__ __forceinline__ bool HasFault(SeededFault fault) {
  return seeded_fault == static_cast<uint32_t>(fault);
}

#else

__device__ constexpr bool HasFault(SeededFault) { return false; }

#endif

}  // namespace megamoe
