// Tensor maps of row-major bf16 matrices, in boxes of 64 columns with the 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/cuda_status.h"

namespace megamoe {

struct Matrix {
  void* data;
  int64_t rows;
  int64_t columns;  // a multiple of 64
};

// Boxes of `box_rows` rows x 64 columns; coordinates (column, row).
CudaStatus RowsMap(const Matrix& matrix, int box_rows, CUtensorMap* map);

// Boxes of 64 rows x `chunks` chunks of 64 columns; coordinates (0, row, column / 64). Chunks past
// the last column are zeros.
CudaStatus ChunksMap(const Matrix& matrix, int chunks, CUtensorMap* map);

}  // namespace megamoe
