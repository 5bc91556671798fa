// What the forward kernel takes: sizes, device pointers and tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/activation.h"
#include "shared/layer.h"

namespace megamoe {

struct ForwardParams : LayerParams {
  uint32_t* h_done;   // [tiles]: N-tiles of h that are in memory
  uint32_t* o_done;   // [tiles]: N-tiles of o that are in memory
  const uint4* x;     // [T, H] bf16
  uint4* pool;        // [P, H] bf16: x of each row, later overwritten by its o
  uint4* y;           // [T, H] bf16
  uint4* gate_up;     // [P, 2 I] bf16: g and u, see kernel/gate_up.cuh; null: they are not kept
  int64_t pool_rows;  // P
  GatedUnit unit;
  ExpertBiases biases;  // null: none
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
