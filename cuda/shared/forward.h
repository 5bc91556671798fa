// What the forward kernel takes: sizes, device pointers and tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/fault.h"
#include "shared/plan.h"
#include "shared/trace.h"

namespace megamoe {

// Edges of an output tile, in columns. A gate_up tile holds 128 columns of gate and the same 128 of
// up, which is one 256-column product.
constexpr int kGateUpColumns = 128;
constexpr int kDownColumns = 256;

// Which parts of the forward one launch does. All of them is the kernel; one at a time is the
// unfused baseline out of the same code.
enum Part : uint32_t {
  kDispatch = 1,
  kGateUp = 2,
  kDown = 4,
  kCombine = 8,
};

// Progress of one call; zero before its first launch. A tile is kTileRows pool rows.
struct ForwardCounters {
  uint32_t* next_item;   // claimed items of the plan's list
  uint32_t* next_row;    // claimed pool rows of the dispatch
  uint32_t* next_token;  // claimed places of token_order
  uint32_t* x_ready;     // [tiles]: rows that hold x, and pads
  uint32_t* h_done;      // [tiles]: N-tiles of h that are in memory
  uint32_t* o_done;      // [tiles]: N-tiles of o that are in memory
};
constexpr int kNumClaims = 3;

struct ForwardParams {
  RoutingDims dims;
  int H;
  int I;
  int experts_per_block;  // E/B of the summation tree
  uint32_t parts;
  WaitContext wait;
  PlanArrays plan;
  ForwardCounters counters;
  const int32_t* expert_idx;   // [T, K]
  const float* expert_weight;  // [T, K]
  const uint4* x;              // [T, H] bf16
  uint4* pool;                 // [P, H] bf16: x of each row, later overwritten by its o
  uint4* y;                    // [T, H] bf16
  TraceBuffer trace;

  // Output tiles side by side.
  MEGAMOE_HOST_DEVICE constexpr int num_gate_up_tiles() const {
    return (I + kGateUpColumns - 1) / kGateUpColumns;
  }
  MEGAMOE_HOST_DEVICE constexpr int num_down_tiles() const {
    return (H + kDownColumns - 1) / kDownColumns;
  }
};

// Row-major bf16 matrices in boxes of 64 columns; see host/forward.cc.
struct ForwardMaps {
  CUtensorMap pool;    // 64 rows a box
  CUtensorMap h;       // 64 rows a box
  CUtensorMap w_gate;  // [E/R H, I] as MN-major chunks, 2 a box
  CUtensorMap w_up;    // likewise
  CUtensorMap w_down;  // [E/R I, H], likewise
};

}  // namespace megamoe
