// The steps of the backward over pool rows: the gradients of gate and up, then those of x.
#pragma once

#include <type_traits>

#include "comm/wait.cuh"
#include "kernel/gate_up.cuh"
#include "kernel/steps.cuh"
#include "pipeline/mutation.cuh"
#include "ptx/activation.cuh"
#include "shared/backward.h"

namespace megamoe {

// x [Wg | Wu], as in the forward.
struct RecomputeProduct : TokenProduct<> {
  static __device__ __forceinline__ int NumKBlocks(const BackwardParams& p, const TileItem&) {
    return p.H / kBlockK;
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.x, barrier, ptx::kEvictNormal, k * kBlockK,
                      item.row + half * kConsumerRows);
  }
  // 128 columns of gate, or those of up.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    const CUtensorMap& map = half == 0 ? maps.w_gate : maps.w_up;
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictLast, 0, item.expert * p.H + k * kBlockK,
                      item.n * 2);
  }
};

// dh = dy Wd^T: the rows of Wd are the columns of dh.
struct DgradDownProduct : TokenProduct<ptx::Major::kK> {
  static constexpr int kColumns = kGateUpColumns;

  static __device__ __forceinline__ int NumKBlocks(const BackwardParams& p, const TileItem&) {
    return p.H / kBlockK;
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.dy, barrier, ptx::kEvictNormal, k * kBlockK,
                      item.row + half * kConsumerRows);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.w_down_by_rows, barrier, ptx::kEvictLast, k * kBlockK,
                      item.n * kGateUpColumns + half * 64,
                      item.expert + HasFault(SeededFault::kWeightsOfNextExpert));
  }
};

// d(g, u) = w dh (silu'(g) u, silu(g)), w h and the tile's share of dw = <h, dh>: 128 rows x 128
// columns of each. g and u are computed again and rounded to bf16, or taken from what the forward
// has kept, which are the same bits.
template <bool kKeptGateUp>
struct DgradDownStep : TokenStep {
  using Products = std::conditional_t<kKeptGateUp, ProductList<DgradDownProduct>,
                                      ProductList<RecomputeProduct, DgradDownProduct>>;
  static constexpr bool kTakesGateUp = kKeptGateUp;
  static constexpr int kStep = 0;
  static constexpr Part kPart = kDgradDown;
  // 64 columns of dg, w h and du, then the other 64.
  static constexpr int kOutChunks = 6;

  static __device__ __forceinline__ int NumColumnTiles(const BackwardParams& p) {
    return NumGateUpTiles(p);
  }
  // All rows of the tile, pads included.
  static __device__ __forceinline__ Flag Input(const BackwardParams& p, const TileItem& item) {
    return {p.counters.x_ready + item.row / kTileRows, kTileRows, Phase::kDispatch};
  }
  static __device__ __forceinline__ void Publish(const BackwardParams& p, const TileItem& item) {
    ptx::AddRelease(p.dz_done + item.row / kTileRows, 1);
    ptx::AddRelease(p.expert_done + item.expert, 1);
  }

  // The two rows of a thread, 8 apart, and the router's weight of each.
  struct Rows {
    int row;
    int slot[2];      // -1 for a pad
    float weight[2];  // 0 in a pad

    __device__ __forceinline__ void ReadMore(const BackwardParams& p) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool is_odd = row / kTileRows % 2 == 1;
        const int from = HasFault(SeededFault::kWeightsOfTileBefore) && is_odd
                             ? p.plan.row_slot[row + 8 * i - kTileRows]
                             : slot[i];
        weight[i] = from >= 0 ? p.expert_weight[from] : 0;
      }
    }
    // All bits, or none in a pad: products over rows read pads, which are 0 whatever the weights of
    // the expert hold.
    __device__ __forceinline__ uint32_t Mask(int i) const {
      const bool is_last = (row + 8 * i) % kTileRows == kTileRows - 1;
      if (HasFault(SeededFault::kLastRowIsPad) && is_last) return 0;
      return slot[i] >= 0 ? ~0u : 0u;
    }
  };
  static __device__ __forceinline__ Rows ReadRows(const BackwardParams& p, const TileItem& item,
                                                  int consumer) {
    const int row = item.row + consumer * kConsumerRows + ThreadRow();
    return {row, {p.plan.row_slot[row], p.plan.row_slot[row + 8]}, {0, 0}};
  }

  static __device__ __forceinline__ void TakeGateUp(const BackwardParams& p, const TileItem& item,
                                                    int consumer, uint32_t (&gu)[64]) {
    LoadGateUp(p.gate_up, p, item, consumer, gu);
  }

  // gu: packed, 32 words of g and 32 of u, which du replaces. dh is left undefined.
  static __device__ __forceinline__ void Finish(const BackwardParams& p, const TileItem& item,
                                                const Rows& rows, uint32_t (&gu)[64],
                                                float (&dh)[64], Staging& staging) {
    float dw[2] = {0, 0};
    const uint32_t mask[2] = {rows.Mask(0), rows.Mask(1)};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int chunk = 3 * half;
      uint32_t wh[4][4];
      staging.Open(chunk);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        uint32_t dg[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int word = 16 * half + 4 * c + i;
          const int r = i % 2;
          const float w = rows.weight[r];
          const Gradient low = GradientOf(ptx::LowBf16(gu[word]), ptx::LowBf16(gu[32 + word]), w,
                                          dh[2 * word], dw[r]);
          const Gradient high = GradientOf(ptx::HighBf16(gu[word]), ptx::HighBf16(gu[32 + word]), w,
                                           dh[2 * word + 1], dw[r]);
          dg[i] = ptx::PackBf16(low.dg, high.dg) & mask[r];
          gu[32 + word] = ptx::PackBf16(low.du, high.du) & mask[r];
          wh[c][i] = ptx::PackBf16(low.wh, high.wh) & mask[r];
        }
        staging.Put(chunk, c, dg);
        ptx::EndBlock();  // one group at a time: more do not fit into the registers
      }
      staging.Close(chunk);
      // Before the last buffer is handed over: the store warp publishes the tile behind it.
      if (half == 1) WriteDw(p, item, rows.row, dw);
      staging.Open(chunk + 1);
#pragma unroll
      for (int c = 0; c < 4; ++c) staging.Put(chunk + 1, c, wh[c]);
      staging.Close(chunk + 1);
      staging.Open(chunk + 2);
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int word = 32 + 16 * half + 4 * c;
        staging.Put(chunk + 2, c, {gu[word], gu[word + 1], gu[word + 2], gu[word + 3]});
      }
      staging.Close(chunk + 2);
    }
  }

  static __device__ __forceinline__ void StoreChunk(const BackwardMaps& maps, const BackwardParams&,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    const int which = chunk % 3;
    const CUtensorMap& map = which == 0 ? maps.dg : which == 1 ? maps.wh : maps.du;
    ptx::TmaStore(map, staging, item.n * kGateUpColumns + chunk / 3 * 64,
                  item.row + consumer * kConsumerRows);
  }

 private:
  struct Gradient {
    float dg, du, wh;
  };
  // Of one element; adds its share to dw.
  static __device__ __forceinline__ Gradient GradientOf(float g, float u, float w, float dh,
                                                        float& dw) {
    auto [silu, slope] = ptx::SiluWithSlope(g);
    if (HasFault(SeededFault::kSlopeOfRelu)) slope = g > 0 ? 1 : 0;
    const float h = silu * u;
    dw = fmaf(HasFault(SeededFault::kDwWeighted) ? w * h : h, dh, dw);
    const float wdh = w * dh;
    return {wdh * (u * slope), wdh * silu, HasFault(SeededFault::kDwDownUnweighted) ? h : w * h};
  }

  // dw: of the thread's columns, in its two rows.
  static __device__ __forceinline__ void WriteDw(const BackwardParams& p, const TileItem& item,
                                                 int row, float (&dw)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      dw[i] += __shfl_xor_sync(kAllLanes, dw[i], 1);
      dw[i] += __shfl_xor_sync(kAllLanes, dw[i], 2);
      if (threadIdx.x % 4 == 0) {
        p.dw_partial[int64_t{row + 8 * i} * NumGateUpTiles(p) + item.n] = dw[i];
      }
    }
  }
};

// dg Wg^T + du Wu^T: first the K-blocks of gate, then those of up. The rows of a weight are the
// columns of dx.
struct DgradGateUpProduct : TokenProduct<ptx::Major::kK> {
  static __device__ __forceinline__ int NumKBlocks(const BackwardParams& p, const TileItem&) {
    return 2 * (p.I / kBlockK);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams& p,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    const int of_up = k - p.I / kBlockK;
    const CUtensorMap& map = of_up < 0 ? maps.dg : maps.du;
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictNormal, (of_up < 0 ? k : of_up) * kBlockK,
                      item.row + half * kConsumerRows);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    const int of_up = k - p.I / kBlockK;
    const bool is_gate = (of_up < 0) != HasFault(SeededFault::kGateAndUpSwapped);
    const CUtensorMap& map = is_gate ? maps.w_gate_by_rows : maps.w_up_by_rows;
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictLast, (of_up < 0 ? k : of_up) * kBlockK,
                      item.n * kDownColumns + half * 128, item.expert);
  }
};

// dx of each row: 128 rows x 256 columns.
struct DgradGateUpStep : TokenStep {
  using Products = ProductList<DgradGateUpProduct>;
  static constexpr int kStep = 1;
  static constexpr Part kPart = kDgradGateUp;
  static constexpr int kOutChunks = kDownColumns / 64;

  static __device__ __forceinline__ int NumColumnTiles(const BackwardParams& p) {
    return NumDownTiles(p);
  }
  // All columns of the tile's dg and du.
  static __device__ __forceinline__ Flag Input(const BackwardParams& p, const TileItem& item) {
    return {p.dz_done + item.row / kTileRows, static_cast<uint32_t>(NumGateUpTiles(p)),
            Phase::kDgradDown};
  }
  static __device__ __forceinline__ void Publish(const BackwardParams& p, const TileItem& item) {
    ptx::AddRelease(p.dx_done + item.row / kTileRows, 1);
  }

  static __device__ __forceinline__ void PutColumns(const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    PutRounded(staging, acc, chunk, c);
  }
  static __device__ __forceinline__ void StoreChunk(const BackwardMaps& maps, const BackwardParams&,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    ptx::TmaStore(maps.dx, staging, item.n * kDownColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

}  // namespace megamoe
