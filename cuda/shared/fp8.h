// FP8 operands: which values share a scale, and how rows of codes lie in memory.
//
// A group is 128 neighbours of a row; a weight has a scale for each block of 128 x 128. Scales are
// powers of two, codes e4m3fn; jax_megamoe/quantization.py defines both.
//
// A row of D columns is D codes and behind them its D / 128 scales (float32), in whole lines of
// 128 bytes: one copy moves both, and four scales never lie across two lines.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/problem.h"

namespace megamoe {

constexpr int kFp8Group = 128;

// float32 scales of D columns, in as many bytes as a multiple of `multiple` takes.
MEGAMOE_HOST_DEVICE constexpr int ScaleBytes(int D, int multiple) {
  const int bytes = D / kFp8Group * static_cast<int>(sizeof(float));
  return (bytes + multiple - 1) / multiple * multiple;
}
// From one row of codes to the next.
MEGAMOE_HOST_DEVICE constexpr int CodeRowBytes(int D) { return D + ScaleBytes(D, 128); }
MEGAMOE_HOST_DEVICE constexpr int CodeRowFloats(int D) {
  return CodeRowBytes(D) / static_cast<int>(sizeof(float));
}
// Of these, what a copy of a row moves.
MEGAMOE_HOST_DEVICE constexpr int CopiedCodeBytes(int D) { return D + ScaleBytes(D, 16); }

// Where the scales of a row begin, in floats from where the rows do.
MEGAMOE_HOST_DEVICE constexpr int64_t FirstScale(int D, int64_t row) {
  return row * CodeRowFloats(D) + D / static_cast<int>(sizeof(float));
}

// The scales of rows of codes, which lie behind them.
struct RowScales {
  float* first;    // of row 0
  int row_floats;  // from one row to the next
};

// The scales of the experts' weights, each M x N: [E, M / 128, N / 128].
struct ExpertScales {
  const float* gate;  // H x I
  const float* up;    // H x I
  const float* down;  // I x H
};

// What the kernel that quantises rows takes.
struct QuantizeParams {
  const uint4* x;  // [num_rows, D] bf16
  uint8_t* codes;  // [num_rows] rows of D codes
  int num_rows;
  int D;  // a multiple of 128
};

}  // namespace megamoe
