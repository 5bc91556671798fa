// What the kernels of the layer read and write of the ranks of their expert group.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/peers.h"

namespace megamoe {

// By rank, this one included: the arrays of its workspace. Nothing of them is ever cleared; a flag
// that holds the epoch of a call is raised for it. host/peer_arrays.h says how they lie.
struct PeerArrays {
  // What a rank gives to the others.
  uint4* x[kMaxRanks];   // [T, H] bf16, its own
  uint4* dy[kMaxRanks];  // [T, H] bf16, its own, in the backward
  // With precision="fp8_block" rows of H codes of both, see shared/fp8.h.
  uint4* x_codes[kMaxRanks];   // [T]
  uint4* dy_codes[kMaxRanks];  // [T], in the backward
  // What it gets from them, the writer's part at the index of its rank.
  int32_t* expert_idx[kMaxRanks];    // [R, T, K], of every other call
  float* expert_weight[kMaxRanks];   // [R, T, K], likewise
  uint32_t* inputs_done[kMaxRanks];  // [R]: the epoch when the above and x and dy are there
  void* sums[kMaxRanks];             // [R, T, H]: of the writer's experts' rows of a token
  float* dw[kMaxRanks];              // [T, K]: of a route, written by the rank of its expert
  uint32_t* sums_done[kMaxRanks];    // [R, T]: the epoch when both are there
  // The rank's own: blocks of the kernel that shares its inputs, as many as have come to the end.
  uint32_t* blocks_done;
  uint32_t epoch;  // of this call, the same on all ranks
  bool bf16_sums;  // sums are rounded to bf16, else they are float32
};

}  // namespace megamoe
