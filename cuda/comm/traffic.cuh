// Counts what crosses ranks, when the call asks for a trace.
#pragma once

#include "ptx/sync.cuh"
#include "shared/trace.h"

namespace megamoe {

// Adds to a count of the call; without a buffer that is one uniform branch.
template <unsigned long long PeerTraffic::* kCount>
__device__ __forceinline__ void CountTraffic(const TraceBuffer& buffer, int64_t bytes) {
  if (buffer.records == nullptr || bytes == 0) return;
  atomicAdd(&(buffer.traffic()->*kCount), static_cast<unsigned long long>(bytes));
}

}  // namespace megamoe
