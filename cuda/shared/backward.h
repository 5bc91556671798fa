// What the backward kernel takes: sizes, device pointers and tensor maps.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/activation.h"
#include "shared/layer.h"

namespace megamoe {

struct BackwardParams : LayerParams {
  uint32_t* dz_done;      // [tiles]: N-tiles of dg, du, wh and dw_partial that are in memory
  uint32_t* expert_done;  // [E/R]: the same, over all tiles of an expert
  uint32_t* dx_done;      // [tiles]: N-tiles of dx_pool that are in memory
  const uint4* x;         // [T, H] bf16
  const uint4* dy;        // [T, H] bf16
  const uint4* gate_up;   // [P, 2 I] bf16, of the forward; null: g and u are computed again
  uint4* dg;              // [P, I] bf16; until an item's dg and du are stored, its g and u
  uint4* du;              // [P, I] bf16
  uint4* x_pool;          // [P, H] bf16: x of each row; 0 in the pads of its last 64 rows
  uint4* dy_pool;         // [P, H] bf16: dy likewise
  const uint4* dx_pool;   // [P, H] bf16: dx of each row
  uint4* dx;              // [T, H] bf16
  float* dw_partial;      // [P, N-tiles of I]: dw of each row, by column tile
  float* dw;              // [T, K]
  GatedUnit unit;
  ExpertBiases biases;    // null: none
  BiasGradients dbiases;  // null: none, or of frozen experts
  float2* bias_rows;      // [P], with biases: <dy, b_down> of each row and its router weight
};

// Row-major matrices in boxes of 128 bytes a row; see host/backward.cc.
struct BackwardMaps {
  CUtensorMap x;               // [P, H]; like the next five bf16, 64 rows a box
  CUtensorMap dy;              // [P, H]
  CUtensorMap dg;              // [P, I]: d(x Wg)
  CUtensorMap du;              // [P, I]: d(x Wu)
  CUtensorMap wh;              // [P, I]: expert_weight h
  CUtensorMap dx;              // [P, H]
  CUtensorMap w_gate;          // [E/R H, I] as MN-major chunks, 2 a box
  CUtensorMap w_up;            // likewise
  CUtensorMap w_gate_by_rows;  // [E/R, H, I], 128 rows a box
  CUtensorMap w_up_by_rows;    // likewise
  CUtensorMap w_down_by_rows;  // [E/R, I, H], 128 rows a box
  CUtensorMap dw_gate;  // [E/R H, I]; like the next two in the dtype of the gradients, 64 rows
  CUtensorMap dw_up;    // [E/R H, I]
  CUtensorMap dw_down;  // [E/R I, H]
};

}  // namespace megamoe
