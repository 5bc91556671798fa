// What products of FP8 codes share. Operands are e4m3 codes, both K-major, in the same bytes of a
// stage as in bf16. Each K-block of 128 is summed by itself and added, times the scales of both
// operands, to float32 sums.
#pragma once

#include "kernel/steps.cuh"
#include "shared/fp8.h"

namespace megamoe {

// What a pass with such products says of itself.
struct CodeNeeds {
  // An item has half as many K-blocks as in bf16, which take as long each: with more, those of down
  // would be announced late.
  static constexpr int kAnnounceAhead = 4;
  // The sums and those of a K-block take 192 registers of those that multiply; hence the others
  // have few, and sum few columns at once.
  static constexpr int kMultiplyRegisters = 216;
  static constexpr int kServiceRegisters = 72;
  static constexpr int kLaneColumns = 8;
};

// Of a matrix with `columns` columns, K-blocks or blocks of scales; made anew wherever they are
// needed.
__device__ __forceinline__ int CodeBlocks(int columns) {
  static_assert(kBlockCodesK == kFp8Group);
  uint32_t anew = columns;
  ptx::PinRegister(anew);
  return static_cast<int>(anew / kFp8Group);
}

struct Fp8Product : TokenProduct<ptx::Major::kK> {
  // 64 rows of codes of a tile of pool rows, of K-block k.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadCodes(const CUtensorMap& map, const TileItem& item,
                                                   int half, int k, uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictNormal, k * kBlockCodesK,
                      item.row + half * kConsumerRows);
  }
  // Of columns behind the last, whose products are 0 and are not stored, the last.
  static __device__ __forceinline__ int ColumnBlock(const TileItem& item, int half,
                                                    int num_blocks) {
    return min(item.n * 2 + half, num_blocks - 1);
  }
  // The scale of a block of expert e's rows x columns, in blocks.
  static __device__ __forceinline__ const float* Block(const float* scales, int e, int rows,
                                                       int columns, int row, int column) {
    int block = (e * rows + row) * columns + column;
    ptx::PinRegister(block);  // what it is made of ends before the address begins
    return scales + block;
  }
};

}  // namespace megamoe
