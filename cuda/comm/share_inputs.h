// The kernel that gives the ranks of an expert group each other's inputs, before the plan.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/fault.h"
#include "shared/peer_arrays.h"
#include "shared/problem.h"
#include "shared/trace.h"

namespace megamoe {

constexpr int kShareThreads = 384;

struct ShareParams {
  RoutingDims dims;
  int H;
  const void* x;               // [T, H] bf16; null: not shared
  const void* dy;              // [T, H] bf16; likewise
  const int32_t* expert_idx;   // [T, K]
  const float* expert_weight;  // [T, K]
  WaitContext wait;
  PeerArrays peers;
  TraceBuffer trace;
};

CudaStatus LoadShareInputs();

// When it has ended, all ranks' inputs of the call are there, or the call has failed.
CudaStatus LaunchShareInputs(cudaStream_t stream, int num_multiprocessors,
                             const ShareParams& params);

}  // namespace megamoe
