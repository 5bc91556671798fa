// The two GEMMs of the forward: what each reads, waits on, signals, and how its result is finished.
#pragma once

#include "comm/wait.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "shared/forward.h"

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

// h = silu(x Wg) * (x Wu): 128 rows x (128 gate + the same 128 up) columns.
struct GateUpStep {
  static constexpr int kStep = 0;
  static constexpr Part kPart = kGateUp;
  static constexpr int kOutChunks = kGateUpColumns / 64;

  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p) { return p.H / kBlockK; }
  static __device__ __forceinline__ int NumColumnTiles(const ForwardParams& p) {
    return p.num_gate_up_tiles();
  }
  // All rows of the tile, pads included.
  static __device__ __forceinline__ Flag Input(const ForwardParams& p, int tile) {
    return {p.counters.x_ready + tile, kTileRows, Phase::kDispatch};
  }
  static __device__ __forceinline__ uint32_t* Done(const ForwardParams& p, int tile) {
    return p.counters.h_done + tile;
  }

  // 64 rows of A from `row` on.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const ForwardMaps& maps, int row, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.pool, barrier, ptx::kEvictNormal, k * kBlockK, row);
  }
  // Half of B: 128 columns of gate, or those of up.
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const ForwardMaps& maps,
                                                     const ForwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    const CUtensorMap& map = half == 0 ? maps.w_gate : maps.w_up;
    LoadBox<kForBoth>(to, map, barrier, ptx::kEvictLast, 0, item.expert * p.H + k * kBlockK,
                      item.n * 2);
  }

  // Columns 2 j and 2 j + 1 of the thread's share of the result, packed.
  static __device__ __forceinline__ uint32_t Finish(const float (&acc)[128], int j) {
    return ptx::PackBf16(ptx::Silu(acc[2 * j]) * acc[64 + 2 * j],
                         ptx::Silu(acc[2 * j + 1]) * acc[65 + 2 * j]);
  }
  static __device__ __forceinline__ void StoreChunk(const ForwardMaps& maps, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    ptx::TmaStore(maps.h, staging, item.n * kGateUpColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

// o = h Wd: 128 rows x 256 columns.
struct DownStep {
  static constexpr int kStep = 1;
  static constexpr Part kPart = kDown;
  static constexpr int kOutChunks = kDownColumns / 64;

  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p) { return p.I / kBlockK; }
  static __device__ __forceinline__ int NumColumnTiles(const ForwardParams& p) {
    return p.num_down_tiles();
  }
  // All columns of the tile's h.
  static __device__ __forceinline__ Flag Input(const ForwardParams& p, int tile) {
    return {p.counters.h_done + tile, static_cast<uint32_t>(GateUpStep::NumColumnTiles(p)),
            Phase::kGateUp};
  }
  static __device__ __forceinline__ uint32_t* Done(const ForwardParams& p, int tile) {
    return p.counters.o_done + tile;
  }

  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const ForwardMaps& maps, int row, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.h, barrier, ptx::kEvictNormal, k * kBlockK, row);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const ForwardMaps& maps,
                                                     const ForwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.w_down, barrier, ptx::kEvictLast, 0, item.expert * p.I + k * kBlockK,
                      item.n * 4 + half * 2);
  }

  static __device__ __forceinline__ uint32_t Finish(const float (&acc)[128], int j) {
    return ptx::PackBf16(acc[2 * j], acc[2 * j + 1]);
  }
  static __device__ __forceinline__ void StoreChunk(const ForwardMaps& maps, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    ptx::TmaStore(maps.pool, staging, item.n * kDownColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

// What the roles need to know of the forward.
struct ForwardSteps {
  using Params = ForwardParams;
  using Maps = ForwardMaps;

  // Calls f.template operator()<Step>() for the step with the given number.
  template <typename F>
  static __device__ __forceinline__ void With(int step, F&& f) {
    if (step == GateUpStep::kStep) {
      f.template operator()<GateUpStep>();
    } else {
      f.template operator()<DownStep>();
    }
  }
};

}  // namespace megamoe
