// What the kernels of the forward with precision="fp8_block" take.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/forward.h"

namespace megamoe {

// The scales of a product: those of A lie in rows of floats, those of B are of blocks of an expert.
struct Fp8Scales {
  float* rows;             // those of row 0
  int row_floats;          // from one row to the next
  int num_k_blocks;        // of A and B
  const float* blocks[2];  // [E, num_k_blocks, num_columns]: of either half of a tile's columns
  int num_columns;         // of blocks
};

// As the bf16 forward, but for its operands. Of ForwardParams x is null, and pool holds o
// alone.
struct Fp8ForwardParams : ForwardParams {
  uint8_t* x_codes;          // [T] rows of H codes, see shared/fp8.h
  uint8_t* x_pool;           // [P] rows of H codes: those of each row's token
  Fp8Scales gate_up_scales;  // rows: of x_pool; blocks: those of gate, those of up
  Fp8Scales down_scales;     // rows: of h, which gate_up writes; blocks: twice those of down
};

// Of codes, in boxes of 128 columns: ForwardMaps::h, 64 rows a box, and the weights, which are
// K-major. ForwardMaps::pool is that of o.
struct Fp8ForwardMaps : ForwardMaps {
  // w_gate, w_up: [E I, H], 128 rows a box. w_down: [E, H, I], likewise.
  CUtensorMap x;  // of x_pool, 64 rows a box
};

}  // namespace megamoe
