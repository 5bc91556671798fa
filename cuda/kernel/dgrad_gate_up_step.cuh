// The second step of the backward, over pool rows: the gradients of x.
#pragma once

#include "comm/wait.cuh"
#include "kernel/steps.cuh"
#include "pipeline/mutation.cuh"
#include "shared/backward.h"

namespace megamoe {

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
    LoadPoolRows<kForBoth>(map, item, half, of_up < 0 ? k : of_up, to, barrier);
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

// dx of each row.
struct DgradGateUpStep : HiddenRowsStep<&BackwardMaps::dx> {
  using Products = ProductList<DgradGateUpProduct>;
  static constexpr int kStep = 1;
  static constexpr Part kPart = kDgradGateUp;

  // All columns of the tile's dg and du.
  static __device__ __forceinline__ Flag Input(const BackwardParams& p, const TileItem& item) {
    return {p.dz_done + item.row / kTileRows, static_cast<uint32_t>(NumDgradDownTiles(p)),
            Phase::kDgradDown};
  }
  static __device__ __forceinline__ void Publish(const BackwardParams& p, const TileItem& item) {
    ptx::AddRelease(p.dx_done + item.row / kTileRows, 1);
  }
};

}  // namespace megamoe
