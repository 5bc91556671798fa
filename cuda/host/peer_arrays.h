// Where the arrays of the layer lie in the workspace of a rank.
#pragma once

#include <cstdint>

#include "shared/peer_arrays.h"
#include "shared/problem.h"

namespace megamoe {

// Bytes of each rank's workspace, for both passes. They and the places of the arrays depend on
// these numbers alone, which the configuration of a workspace fixes; of two routings, the epoch
// chooses one.
int64_t PeerArrayBytes(const RoutingDims& dims, int H, bool bf16_sums);

PeerArrays PeerArraysOf(const Peers& peers, const RoutingDims& dims, int H, bool bf16_sums);

}  // namespace megamoe
