// A kernel that only exchanges rows with its peers: the tests of how peers find each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"
#include "shared/fault.h"
#include "shared/peers.h"

namespace megamoe {

struct PeerProbeArrays {
  const int32_t* row;  // [N]
  int32_t* received;   // [R, N], the rows of all ranks
  int64_t N;
};

// The workspace that a call takes of each rank.
int64_t PeerProbeBytes(int64_t num_ranks, int64_t N);

CudaStatus LoadPeerProbe();

// Writes `row` into the workspace of every rank and returns in `received` what they all wrote here.
CudaStatus LaunchPeerProbe(cudaStream_t stream, const WaitContext& wait, const Peers& peers,
                           const PeerProbeArrays& arrays);

}  // namespace megamoe
