// Where the arrays of the layer lie in the workspace of a rank.
#pragma once

#include <cstdint>

#include "shared/peer_arrays.h"
#include "shared/problem.h"

namespace megamoe {

// All that the places of the arrays depend on, which the configuration of a workspace fixes.
struct PeerLayout {
  RoutingDims dims;
  int H;
  bool bf16_sums;  // of PeerArrays
  bool has_codes;  // rows cross as FP8 codes, too
};

// Bytes of each rank's workspace, for both passes.
int64_t PeerArrayBytes(const PeerLayout& layout);

// Of two routings, the epoch chooses one.
PeerArrays PeerArraysOf(const Peers& peers, const PeerLayout& layout);

}  // namespace megamoe
