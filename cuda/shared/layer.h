// What the kernels of both passes take, whatever they compute.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/fault.h"
#include "shared/part.h"
#include "shared/peer_arrays.h"
#include "shared/plan.h"
#include "shared/problem.h"
#include "shared/trace.h"

namespace megamoe {

// Edges of an output tile, in columns. A tile of gate and up holds 128 columns of gate and the same
// 128 of up, which is one 256-column product.
constexpr int kGateUpColumns = 128;
constexpr int kDownColumns = 256;
constexpr int kDgradDownColumns = 2 * kGateUpColumns;

// Output tiles side by side, of a matrix with I columns and of one with H.
MEGAMOE_HOST_DEVICE constexpr int NumGateUpTiles(int I) {
  return (I + kGateUpColumns - 1) / kGateUpColumns;
}
MEGAMOE_HOST_DEVICE constexpr int NumDgradDownTiles(int I) {
  return (I + kDgradDownColumns - 1) / kDgradDownColumns;
}
MEGAMOE_HOST_DEVICE constexpr int NumDownTiles(int H) {
  return (H + kDownColumns - 1) / kDownColumns;
}

// Progress of one call; zero before its first launch. A tile is kTileRows pool rows.
struct LayerCounters {
  uint32_t* next_item;   // claimed items of the plan's list
  uint32_t* next_row;    // claimed pool rows of the dispatch
  uint32_t* next_token;  // claimed places of token_order
  uint32_t* next_own;    // claimed tokens of this rank, with peers
  uint32_t* x_ready;     // [tiles]: rows that the dispatch has written, and pads
};
constexpr int kNumClaims = 4;

struct LayerParams {
  RoutingDims dims;
  int H;
  int I;
  int experts_per_block;  // E/B of the summation tree
  uint32_t parts;         // of this launch
  int pass;               // of this launch, from 0
  WaitContext wait;
  PlanArrays plan;
  LayerCounters counters;
  const int32_t* expert_idx;   // [R, T, K]
  const float* expert_weight;  // [R, T, K]
  PeerArrays peers;            // with more than one rank
  TraceBuffer trace;
};

}  // namespace megamoe
