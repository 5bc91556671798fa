// What the steps of both passes share.
//
// A step is what one kind of item does. It names the products that it accumulates, in the order in
// which their operands are loaded, and says what an item waits for, how its result is finished,
// where it is stored and who is told. A product says how large it is and how its operands come into
// a stage: 128 rows of A in two halves of 64, and kColumns columns of B in two halves. Both blocks
// of an item have the same number of K-blocks: each fills stages of the other.
#pragma once

#include "pipeline/products.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/staging.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "shared/layer.h"

namespace megamoe {

// One box into a stage of this block, or of both blocks of the pair.
template <bool kForBoth, typename... Coordinates>
__device__ __forceinline__ void LoadBox(uint32_t stage, const CUtensorMap& map, uint32_t barrier,
                                        uint64_t policy, Coordinates... at) {
  if constexpr (kForBoth) {
    ptx::TmaMulticast(stage, map, barrier, at..., policy, kBothBlocks);
  } else {
    ptx::TmaLoad(stage, map, barrier, at..., policy);
  }
}

// 64 rows of a tile of pool rows, of K-block k.
template <bool kForBoth>
__device__ __forceinline__ void LoadPoolRows(const CUtensorMap& map, const TileItem& item, int half,
                                             int k, uint32_t to, uint32_t barrier) {
  LoadBox<kForBoth>(to, map, barrier, ptx::kEvictNormal, k * kBlockK,
                    item.row + half * kConsumerRows);
}

// Of tile `tile` of gate and up, 128 columns of gate, or those of up.
template <bool kForBoth, typename Maps>
__device__ __forceinline__ void LoadGateOrUp(const Maps& maps, const LayerParams& p,
                                             const TileItem& item, int tile, int half, int k,
                                             uint32_t to, uint32_t barrier) {
  const CUtensorMap& map = half == 0 ? maps.w_gate : maps.w_up;
  LoadBox<kForBoth>(to, map, barrier, ptx::kEvictLast, 0, item.expert * p.H + k * kBlockK,
                    tile * 2);
}

__device__ __forceinline__ int NumGateUpTiles(const LayerParams& p) { return NumGateUpTiles(p.I); }
__device__ __forceinline__ int NumDgradDownTiles(const LayerParams& p) {
  return NumDgradDownTiles(p.I);
}
__device__ __forceinline__ int NumDownTiles(const LayerParams& p) { return NumDownTiles(p.H); }

// Sixteen columns of a chunk of 64, rounded to bf16.
__device__ __forceinline__ void PutRounded(const Staging& staging, const float (&acc)[128],
                                           int chunk, int c) {
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int j = 32 * chunk + 8 * c + 2 * i;
    packed[i] = ptx::PackBf16(acc[j], acc[j + 1]);
  }
  staging.Put(chunk, c, packed);
}

// The first of the two rows, 8 apart, of which a product leaves a thread its sums: of the
// consumer's.
__device__ __forceinline__ int ThreadRow() {
  const int thread = ThreadAnew() % kGroupThreads;
  return thread / kWarpThreads * 16 + thread % kWarpThreads / 4;
}

// Calls f.template operator()<Step>() for that of the steps which has the number; the last one is
// not asked.
template <typename Step, typename... Others, typename F>
__device__ __forceinline__ void WithStep(int step, F&& f) {
  if constexpr (sizeof...(Others) == 0) {
    f.template operator()<Step>();
  } else if (step == Step::kStep) {
    f.template operator()<Step>();
  } else {
    WithStep<Others...>(step, f);
  }
}

// What a step does not do unless it says so.
struct PlainStep {
  // Puts its whole result by Finish, not sixteen columns at a time by PutColumns.
  static constexpr bool kHasFinish = false;
  // Multiplies FP8 codes.
  static constexpr bool kIsOfCodes = false;
  // K-blocks of an item that are loaded after the next item is announced.
  static constexpr int kAnnounceAhead = 7;
  // Stores g and u for its own finish.
  static constexpr bool kMakesGateUp = false;
  // What Begin returns also reads each stage of the result's product, by ReadStage, and ends by
  // EndStages behind it.
  static constexpr bool kReadsStages = false;

  // Keeps more than its result: Begin comes before the products, Keep behind them, and KeepPads in
  // a consumer whose half of the tile is all pads.
  struct Nothing {};
  template <typename Params>
  static __device__ __forceinline__ Nothing Begin(const Params&, const TileItem&, int) {
    return {};
  }
  template <typename Params>
  static __device__ __forceinline__ void Keep(const Params&, const TileItem&, int, Nothing,
                                              const float (&)[128]) {}
  template <typename Params>
  static __device__ __forceinline__ void KeepPads(const Params&, const TileItem&, int) {}
};

// A step whose tiles are pool rows.
struct TokenStep : PlainStep {
  // Its result is read within the call, by whoever waits for the counters that Publish adds to.
  static constexpr bool kIsPublished = true;

  static __device__ __forceinline__ int NumConsumers(const LayerParams& p, int row) {
    return p.plan.row_slot[row + kConsumerRows] >= 0 ? 2 : 1;
  }
  static __device__ __forceinline__ int Depth(const LayerParams&, int) { return 0; }
  static __device__ __forceinline__ int ExpertRow(const LayerParams&, const TileItem&) { return 0; }
};

// A step whose result is rows of H columns, rounded to bf16: 128 rows x 256 columns. kResult: of
// the maps of the pass, the one by which it is stored.
template <auto kResult>
struct HiddenRowsStep : TokenStep {
  static constexpr int kOutChunks = kDownColumns / 64;

  static __device__ __forceinline__ int NumColumnTiles(const LayerParams& p) {
    return NumDownTiles(p);
  }
  template <typename Params, typename Begun>
  static __device__ __forceinline__ void PutColumns(const Params&, const Begun&,
                                                    const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    PutRounded(staging, acc, chunk, c);
  }
  template <typename Maps>
  static __device__ __forceinline__ void StoreChunk(const Maps& maps, const LayerParams&,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    ptx::TmaStore(maps.*kResult, staging, item.n * kDownColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

// 128 rows by 256 columns, with A as rows of k and B as rows of columns or, by default, of k.
template <ptx::Major kB = ptx::Major::kMN>
struct TokenProduct {
  static constexpr int kColumns = 256;
  static constexpr bool kIsMultiplied = true;
  static constexpr bool kIsOfRows = false;
  static constexpr ptx::Major kMajorA = ptx::Major::kK;
  static constexpr ptx::Major kMajorB = kB;
};

}  // namespace megamoe
