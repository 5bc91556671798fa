// What a kernel knows of the GPUs of its expert group.
#pragma once

#include <cstddef>
#include <cstdint>

namespace megamoe {

// R is 1, 2, 4 or 8: a rank holds a whole subtree of the summation tree.
constexpr int kMaxRanks = 8;

// The workspaces of a group in one call, passed to its kernels by value.
//
// Fresh memory is zero, epochs begin at 1 and nothing is cleared between calls. So a flag may hold
// epochs of this configuration alone, and where flags lie may depend on `bytes` and on what the
// configuration fixes, but on nothing else that differs between calls.
struct Peers {
  std::byte* base[kMaxRanks];  // by rank, as this device reaches them; its own one too
  int64_t bytes;               // of each
  uint32_t epoch;              // of the call, the same on all ranks; wraps
  int32_t rank;
  int32_t num_ranks;
};

}  // namespace megamoe
