// Tensor maps of row-major matrices, in boxes of 128 bytes a row with the 128-byte swizzle.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "shared/cuda_status.h"

namespace megamoe {

enum class Element { kBf16, kF32, kByte };

struct Matrix {
  void* data;
  int64_t rows;
  int64_t columns;  // a multiple of 128 bytes
  Element element = Element::kBf16;
  int64_t row_bytes = 0;  // from one row to the next; 0: as many as the columns have
};

// Boxes of `box_rows` rows x 128 bytes; coordinates (column, row).
CudaStatus RowsMap(const Matrix& matrix, int box_rows, CUtensorMap* map);

// The same of matrices that lie one behind the other; coordinates (column, row, matrix). Rows past
// the last one of a matrix are zeros.
CudaStatus StackedRowsMap(const Matrix& matrix, int64_t num_matrices, int box_rows,
                          CUtensorMap* map);

// Of a bf16 matrix, boxes of 64 rows x `chunks` chunks of 64 columns; coordinates (0, row, column /
// 64). Chunks past the last column are zeros.
CudaStatus ChunksMap(const Matrix& matrix, int chunks, CUtensorMap* map);

}  // namespace megamoe
