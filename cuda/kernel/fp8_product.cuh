// What products of FP8 codes share. Operands are e4m3 codes, both K-major, in the same bytes of a
// stage as in bf16. Each K-block of 128 is summed by itself and added, times the scales of both
// operands, to float32 sums.
#pragma once

#include "kernel/steps.cuh"
#include "shared/fp8.h"

namespace megamoe {

// Of an item of such products, K-blocks that are loaded after the next item is announced. It has
// half as many as in bf16, which take as long each: with more, items of down would be announced
// late.
constexpr int kCodesAnnounceAhead = 4;

// What a pass with such products says of itself.
struct CodeNeeds {
  // The sums and those of a K-block take 192 registers of those that multiply; hence the others
  // have few, and sum few columns at once.
  static constexpr int kMultiplyRegisters = 216;
  static constexpr int kServiceRegisters = 72;
  static constexpr int LaneColumns(bool with_peers) { return with_peers ? 4 : 8; }
};

// Of a matrix with `columns` columns, K-blocks or blocks of scales; made anew wherever they are
// needed.
__device__ __forceinline__ int CodeBlocks(int columns) {
  static_assert(kBlockCodesK == kFp8Group);
  uint32_t anew = columns;
  ptx::PinRegister(anew);
  return static_cast<int>(anew / kFp8Group);
}

// kCodes: of the maps of the pass, that of A, rows of codes in a pool. kScales: of its parameters,
// their scales.
template <auto kCodes, auto kScales>
struct Fp8Product : TokenProduct<ptx::Major::kK> {
  template <bool kForBoth, typename Maps, typename Params>
  static __device__ __forceinline__ void LoadRows(const Maps& maps, const Params&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.*kCodes, barrier, ptx::kEvictNormal, k * kBlockCodesK,
                      item.row + half * kConsumerRows);
  }
  template <typename Params>
  static __device__ __forceinline__ const RowScales& Rows(const Params& p) {
    return p.*kScales;
  }
  // Half of the columns of a tile, as rows of a weight of the item's expert.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadWeight(const CUtensorMap& map, const TileItem& item,
                                                    int half, int k, uint32_t to,
                                                    uint32_t barrier) {
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictLast, k * kBlockCodesK,
                      item.n * kTileColumns + half * kFp8Group, item.expert);
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
  // Of K-block k of x [Wg | Wu], tile `tile`: that of gate, in the other half that of up.
  template <typename Params>
  static __device__ __forceinline__ const float* GateUpScale(const Params& p, int expert, int tile,
                                                             int half, int k) {
    return Block(half == 0 ? p.scales.gate : p.scales.up, expert, CodeBlocks(p.H), CodeBlocks(p.I),
                 k, tile);
  }
};

}  // namespace megamoe
