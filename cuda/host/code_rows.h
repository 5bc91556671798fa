// Rows of FP8 codes, as shared/fp8.h lays them out, for tensor maps and kernels.
#pragma once

#include <cstdint>

#include "host/tensor_map.h"
#include "shared/fp8.h"

namespace megamoe {

// Rows of D codes, without the scales behind them.
inline Matrix CodeRows(void* rows, int64_t num_rows, int D) {
  return {rows, num_rows, D, Element::kByte, CodeRowBytes(D)};
}

// Of rows of D codes.
inline RowScales ScalesOf(void* rows, int D) {
  return {static_cast<float*>(rows) + FirstScale(D, 0), CodeRowFloats(D)};
}

}  // namespace megamoe
