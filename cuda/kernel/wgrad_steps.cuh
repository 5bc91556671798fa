// The weight gradients of the backward: products over the pool rows of one expert.
//
// Their K-blocks are 64 pool rows each; of the last one only as many as the expert has are
// multiplied, rounded up to 16, and the pads among those are 0 in both operands. An expert without
// rows has no K-block, and its gradient is 0.
#pragma once

#include "comm/wait.cuh"
#include "kernel/biases.cuh"
#include "kernel/steps.cuh"
#include "pipeline/mutation.cuh"
#include "shared/backward.h"

namespace megamoe {

// How the float32 sums are stored: 128 bytes of a row in each chunk.
struct StoredGradients {
  static constexpr bool kAdds = false;
  static __device__ __forceinline__ void Store(const CUtensorMap& map, const TileItem&,
                                               uint32_t staging, int column, int row) {
    ptx::TmaStore(map, staging, column, row);
  }
};
struct Bf16Gradients : StoredGradients {
  static constexpr int kChunkColumns = 64;
  static __device__ __forceinline__ void PutColumns(const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    PutRounded(staging, acc, chunk, c);
  }
};
struct F32Gradients : StoredGradients {
  static constexpr int kChunkColumns = 32;
  static __device__ __forceinline__ void PutColumns(const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    const int j = 16 * chunk + 4 * c;
    staging.Put(chunk, c, acc[j], acc[j + 1], acc[j + 2], acc[j + 3]);
  }
};

// Added to what earlier passes have stored: each element once in a pass, so that no order shows. An
// expert without rows in the pass adds nothing.
struct AddedGradients : F32Gradients {
  static constexpr bool kAdds = true;
  static __device__ __forceinline__ void Store(const CUtensorMap& map, const TileItem& item,
                                               uint32_t staging, int column, int row) {
    if (item.depth > 0) ptx::TmaAdd(map, staging, column, row);
  }
};

// A^T B over the rows of an expert; a row of either operand is one k.
struct RowsProduct {
  static constexpr int kColumns = 256;
  static constexpr bool kIsMultiplied = true;
  static constexpr bool kIsOfRows = true;
  static constexpr ptx::Major kMajorA = ptx::Major::kMN;
  static constexpr ptx::Major kMajorB = ptx::Major::kMN;

  static __device__ __forceinline__ int NumKBlocks(const BackwardParams&, const TileItem& item) {
    const int multiple = HasFault(SeededFault::kBlockOfPads) ? kTileRows : kBlockK;
    return (item.depth + multiple - 1) / multiple * (multiple / kBlockK);
  }
  // 64 columns of A.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadA(const CUtensorMap& map, const TileItem& item,
                                               int half, int k, uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictNormal, item.row + half * kConsumerRows,
                      item.expert_row + k * kBlockK);
  }
  // 128 columns of B.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadB(const CUtensorMap& map, const TileItem& item,
                                               int column, int k, uint32_t to, uint32_t barrier) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      LoadBox<kForBoth>(to + i * ptx::kChunkBytes, map, barrier, ptx::kEvictNormal, column + i * 64,
                        item.expert_row + k * kBlockK);
    }
  }
};

// What both steps do; their M-tiles are the same for every expert.
struct WgradStep : PlainStep {
  static constexpr bool kIsPublished = false;

  static __device__ __forceinline__ int Depth(const BackwardParams& p, int expert) {
    return p.plan.expert_rows[expert];
  }
  static __device__ __forceinline__ int ExpertRow(const BackwardParams& p, const TileItem& item) {
    return p.plan.expert_start[item.expert];
  }
  // All of the expert's dg, du and w h, and with them its x and dy.
  static __device__ __forceinline__ Flag Input(const BackwardParams& p, const TileItem& item) {
    const int tiles = (item.depth + kTileRows - 1) / kTileRows;
    return {p.expert_done + item.expert, static_cast<uint32_t>(tiles * NumDgradDownTiles(p)),
            Phase::kDgradDown};
  }
};

// (w h)^T dy.
struct WgradDownProduct : RowsProduct {
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadA<kForBoth>(maps.wh, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadB<kForBoth>(maps.dy, item, item.n * kDownColumns + half * 128, k, to, barrier);
  }
};

// dWd: 128 of the I rows x 256 of the H columns of an expert.
template <typename Gradients>
struct WgradDownStep : WgradStep {
  using Products = ProductList<WgradDownProduct>;
  static constexpr int kStep = 2;
  static constexpr Part kPart = kWgradDown;
  static constexpr int kOutChunks = kDownColumns / Gradients::kChunkColumns;

  static __device__ __forceinline__ int NumColumnTiles(const BackwardParams& p) {
    return NumDownTiles(p);
  }
  static __device__ __forceinline__ int NumConsumers(const BackwardParams& p, int row) {
    return row + kConsumerRows < p.I ? 2 : 1;
  }
  template <typename Begun>
  static __device__ __forceinline__ void PutColumns(const BackwardParams&, const Begun&,
                                                    const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    Gradients::PutColumns(staging, acc, chunk, c);
  }
  static __device__ __forceinline__ void StoreChunk(const BackwardMaps& maps,
                                                    const BackwardParams& p, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    Gradients::Store(maps.dw_down, item, staging,
                     item.n * kDownColumns + chunk * Gradients::kChunkColumns,
                     item.expert * p.I + item.row +
                         (consumer ^ HasFault(SeededFault::kHalvesSwapped)) * kConsumerRows);
  }
};

// x^T dg and x^T du.
struct WgradGateUpProduct : RowsProduct {
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadA<kForBoth>(maps.x, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadB<kForBoth>(half == 0 ? maps.dg : maps.du, item, item.n * kGateUpColumns, k, to, barrier);
  }
};

// dWg and dWu: 128 of the H rows x 128 of the I columns of an expert, of each.
template <typename Gradients>
struct WgradGateUpStep : WgradStep {
  using Products = ProductList<WgradGateUpProduct>;
  static constexpr int kStep = 3;
  static constexpr Part kPart = kWgradGateUp;
  static constexpr int kOutChunks = 2 * kGateUpColumns / Gradients::kChunkColumns;

  static __device__ __forceinline__ int NumColumnTiles(const BackwardParams& p) {
    return NumGateUpTiles(p);
  }
  static __device__ __forceinline__ int NumConsumers(const BackwardParams& p, int row) {
    return row + kConsumerRows < p.H ? 2 : 1;
  }
  template <typename Begun>
  static __device__ __forceinline__ void PutColumns(const BackwardParams&, const Begun&,
                                                    const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    Gradients::PutColumns(staging, acc, chunk, c);
  }
  static __device__ __forceinline__ void StoreChunk(const BackwardMaps& maps,
                                                    const BackwardParams& p, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    constexpr int kOfGate = kOutChunks / 2;
    const CUtensorMap& map = chunk < kOfGate ? maps.dw_gate : maps.dw_up;
    Gradients::Store(map, item, staging,
                     item.n * kGateUpColumns + chunk % kOfGate * Gradients::kChunkColumns,
                     item.expert * p.H + item.row + consumer * kConsumerRows);
  }
};

// The same steps of experts with biases, whose gradients are sums over the rows of B: the first
// tile of a column computes them beside its products. In float32 whatever the weights' are.
struct BiasSums {
  bool is_first;
  ColumnSums sums;

  __device__ __forceinline__ bool reads() const { return is_first; }
  static __device__ __forceinline__ BiasSums Begin(const BackwardParams& p, const TileItem& item) {
    return {p.dbiases.down != nullptr && item.row == 0 && item.num_consumers > 0, {}};
  }
  // Of the consumer's columns in a stage.
  static __device__ __forceinline__ uint32_t Columns(uint32_t stage, int consumer) {
    return stage + kStageABytes + consumer * (kStageBBytes / kNumConsumers);
  }
  // columns: of an expert. An expert without rows in a pass behind the first adds nothing.
  template <typename Gradients>
  __device__ __forceinline__ void Store(float* gradient, const TileItem& item, int columns,
                                        int column) {
    if (!is_first || (Gradients::kAdds && item.depth == 0)) return;
    sums.Store(gradient + int64_t{item.expert} * columns + column, columns - column,
               Gradients::kAdds);
  }
};

template <typename Gradients>
struct BiasedWgradDownStep : WgradDownStep<Gradients> {
  static constexpr bool kReadsStages = true;

  struct Begun : BiasSums {
    int first_row;               // of the expert, and the lane's of eight
    float weights[kBlockK / 8];  // of the router, of the lane's rows in a block
  };
  static __device__ __forceinline__ Begun Begin(const BackwardParams& p, const TileItem& item,
                                                int) {
    return {BiasSums::Begin(p, item),
            p.plan.expert_start[item.expert] + static_cast<int>(ColumnSums::LaneRow()),
            {}};
  }
  static __device__ __forceinline__ void LoadForStage(const BackwardParams& p, const TileItem& item,
                                                      int k, Begun& begun) {
    if (k >= WgradDownProduct::NumKBlocks(p, item)) return;
#pragma unroll
    for (int i = 0; i < kBlockK / 8; ++i) {
      begun.weights[i] = __ldcg(&p.bias_rows[begun.first_row + k * kBlockK + i * 8].y);
    }
  }
  static __device__ __forceinline__ void ReadStage(int consumer, uint32_t stage, Begun& begun) {
    begun.sums.Add(BiasSums::Columns(stage, consumer), begun.weights);
  }
  static __device__ __forceinline__ void EndStages(const BackwardParams& p, const TileItem& item,
                                                   int consumer, Begun& begun) {
    const int column = item.n * kDownColumns + consumer * kDownColumns / kNumConsumers;
    begun.template Store<Gradients>(p.dbiases.down, item, p.H, column);
  }
  static __device__ __forceinline__ void Keep(const BackwardParams&, const TileItem&, int,
                                              const Begun&, const float (&)[128]) {}
};

// The first consumer has the columns of gate, the second those of up.
template <typename Gradients>
struct BiasedWgradGateUpStep : WgradGateUpStep<Gradients> {
  static constexpr bool kReadsStages = true;

  static __device__ __forceinline__ BiasSums Begin(const BackwardParams& p, const TileItem& item,
                                                   int) {
    return BiasSums::Begin(p, item);
  }
  static __device__ __forceinline__ void LoadForStage(const BackwardParams&, const TileItem&, int,
                                                      BiasSums&) {}
  static __device__ __forceinline__ void ReadStage(int consumer, uint32_t stage, BiasSums& begun) {
    begun.sums.Add(BiasSums::Columns(stage, consumer), {1, 1, 1, 1, 1, 1, 1, 1});
  }
  static __device__ __forceinline__ void EndStages(const BackwardParams& p, const TileItem& item,
                                                   int consumer, BiasSums& begun) {
    float* const gradient = consumer == 0 ? p.dbiases.gate : p.dbiases.up;
    begun.Store<Gradients>(gradient, item, p.I, item.n * kGateUpColumns);
  }
  static __device__ __forceinline__ void Keep(const BackwardParams&, const TileItem&, int,
                                              const BiasSums&, const float (&)[128]) {}
};

}  // namespace megamoe
