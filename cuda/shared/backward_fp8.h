// What the kernels of the backward with precision="fp8_block" take.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/backward.h"
#include "shared/fp8.h"

namespace megamoe {

// As the bf16 backward, whose products of weight gradients it has, but for the operands of its
// other products.
struct Fp8BackwardParams : BackwardParams {
  const uint4* x_codes;   // [T] rows of H codes, see shared/fp8.h; null if g and u are taken
  const uint4* dy_codes;  // [T] rows of H codes
  uint8_t* x_code_pool;   // [P] rows of H codes: those of each row's token; null as x_codes
  uint8_t* dy_code_pool;  // [P] rows of H codes
  RowScales x_rows;       // of x_code_pool
  RowScales dy_rows;      // of dy_code_pool
  RowScales dz_rows;      // of [P] rows of 2 I codes: dg, behind them du
  ExpertScales scales;
};

// Of codes, in boxes of 128 columns; BackwardMaps::w_* are null.
struct Fp8BackwardMaps : BackwardMaps {
  CUtensorMap x_codes;          // of x_code_pool, 64 rows a box
  CUtensorMap dy_codes;         // of dy_code_pool, likewise
  CUtensorMap dz_codes;         // [P, 2 I], likewise
  CUtensorMap gate_by_columns;  // [E I, H], 128 rows a box
  CUtensorMap up_by_columns;    // likewise
  CUtensorMap gate_by_rows;     // [E, H, I], 128 rows a box
  CUtensorMap up_by_rows;       // likewise
  CUtensorMap down_by_rows;     // [E, I, H], 128 rows a box
};

}  // namespace megamoe
