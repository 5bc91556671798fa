// What a rank of an expert group sees of the others: memory of theirs that its kernels read and
// write. Nothing of it is ever cleared; a flag that holds the epoch of a call is raised for it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace megamoe {

constexpr int kMaxRanks = 8;

// By rank, this one included. Each rank's own arrays, seen from here:
struct Peers {
  const uint4* x[kMaxRanks];   // [T, H] bf16, in place before the kernel starts
  const uint4* dy[kMaxRanks];  // [T, H] bf16, likewise, in the backward
  // What each rank adds to this one's tokens. Written by the rank of the first index.
  float* sums[kMaxRanks];         // [R, T, H]: of its experts' rows of a token
  float* dw[kMaxRanks];           // [T, K]: of the routes to it, in the backward
  uint32_t* sums_done[kMaxRanks];  // [R, T]: the epoch of the call when both are there
  uint32_t epoch;                 // of this call, the same on all ranks
};

}  // namespace megamoe
