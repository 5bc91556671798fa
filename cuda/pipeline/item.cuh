// An item of the plan as the warps of a pair of blocks see it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/problem.h"

namespace megamoe {

constexpr int kPairBlocks = 2;  // blocks of a cluster; they work on one item
constexpr uint16_t kBothBlocks = 0b11;

// One item as the pair of blocks gets it, in 16 bytes. A tall item is two tiles one above the
// other, a wide one two tiles side by side; the first block takes the first.
struct alignas(16) PairItem {
  int8_t step;     // kNoMoreItems ends the walk
  uint8_t shape;   // ShapeOf
  int16_t expert;  // at most kMaxExperts
  int32_t depth;   // see TileItem
  int32_t row;     // of the first tile
  int32_t n;       // likewise

  // num_consumers of the two blocks: see TileItem.
  static __device__ __forceinline__ uint8_t ShapeOf(bool wide, int first, int second) {
    return static_cast<uint8_t>(wide | first << 1 | second << 3);
  }
  __device__ __forceinline__ bool is_wide() const { return shape & 1; }
  __device__ __forceinline__ int num_consumers(int rank) const {
    return shape >> (1 + 2 * rank) & 3;
  }
};
static_assert(sizeof(PairItem) == sizeof(uint4));
constexpr int kNoMoreItems = -1;

// The part of an item that one block does.
struct TileItem {
  int step;
  bool is_wide;
  // 2; 1 when the upper 64 rows of the tile are all pads; 0 for no tile: the block only feeds its
  // peer.
  int num_consumers;
  int expert;
  int depth;  // rows of the expert, of products over them; of other products it says nothing
  int row;    // first of the tile
  int n;
  int expert_row = 0;  // first pool row of the expert, in the load role alone, where depth is
};

__device__ __forceinline__ TileItem TileOf(const PairItem& pair, int rank) {
  const int num_consumers = pair.num_consumers(rank);
  const int second_row = pair.is_wide() ? 0 : kTileRows;
  const int second_column = pair.is_wide() && num_consumers > 0 ? 1 : 0;
  return {pair.step,
          pair.is_wide(),
          num_consumers,
          pair.expert,
          pair.depth,
          pair.row + rank * second_row,
          pair.n + rank * second_column};
}

}  // namespace megamoe
