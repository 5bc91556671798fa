// FP8 codes for tensor maps and kernels: weights, and rows as shared/fp8.h lays them out.
#pragma once

#include <cstdint>

#include "host/tensor_map.h"
#include "shared/fp8.h"

namespace megamoe {

inline Matrix Codes(const void* codes, int64_t rows, int columns) {
  return {const_cast<void*>(codes), rows, columns, Element::kByte};
}

// Rows of D codes, without the scales behind them.
inline Matrix CodeRows(void* rows, int64_t num_rows, int D) {
  return {rows, num_rows, D, Element::kByte, CodeRowBytes(D)};
}

// Of rows of D codes.
inline RowScales ScalesOf(void* rows, int D) {
  return {static_cast<float*>(rows) + FirstScale(D, 0), CodeRowFloats(D)};
}

}  // namespace megamoe
