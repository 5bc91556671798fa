// What the kernels of the forward with precision="fp8_block" take.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/forward.h"
#include "shared/fp8.h"

namespace megamoe {

// As the bf16 forward, but for its operands. Of ForwardParams x is null, and pool holds o
// alone.
struct Fp8ForwardParams : ForwardParams {
  const uint4* x_codes;  // [T] rows of H codes, see shared/fp8.h
  uint8_t* x_pool;       // [P] rows of H codes: those of each row's token
  RowScales x_rows;      // of x_pool
  RowScales h_rows;      // of [P] rows of I codes, which gate_up writes
  ExpertScales scales;
};

// Of codes, in boxes of 128 columns: ForwardMaps::h, 64 rows a box, and the weights, which are
// K-major. ForwardMaps::pool is that of o.
struct Fp8ForwardMaps : ForwardMaps {
  // w_gate, w_up: [E I, H], 128 rows a box. w_down: [E, H, I], likewise.
  CUtensorMap x;  // of x_pool, 64 rows a box
};

}  // namespace megamoe
