// The two GEMMs of the forward: what each reads, waits on, signals, and how its result is finished.
#pragma once

#include "pipeline/shared_memory.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "shared/forward.h"

namespace megamoe {

// h = silu(x Wg) * (x Wu): 128 rows x (128 gate + the same 128 up) columns.
struct GateUpStep {
  static constexpr int kStep = 0;
  static constexpr Part kPart = kGateUp;
  static constexpr int kOutChunks = kGateUpColumns / 64;

  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p) { return p.H / kBlockK; }
  // Waits for all rows of the tile, pads included.
  static __device__ __forceinline__ bool IsReady(const ForwardParams& p, int tile) {
    return ptx::LoadAcquire(p.counters.x_ready + tile) >= kTileRows;
  }
  static __device__ __forceinline__ uint32_t* Done(const ForwardParams& p, int tile) {
    return p.counters.h_done + tile;
  }

  static __device__ __forceinline__ void LoadStage(const ForwardMaps& maps, const ForwardParams& p,
                                                   const TileItem& item, int k, uint32_t stage,
                                                   uint32_t barrier) {
    const uint32_t b = stage + kStageABytes;
    const int weight_row = item.expert * p.H + k * kBlockK;
    ptx::TmaLoad(stage, maps.x_rows, barrier, k * kBlockK, item.row, ptx::kEvictNormal);
    ptx::TmaLoad(b, maps.w_gate, barrier, 0, weight_row, item.n * 2, ptx::kEvictLast);
    ptx::TmaLoad(b + 2 * ptx::kChunkBytes, maps.w_up, barrier, 0, weight_row, item.n * 2,
                 ptx::kEvictLast);
  }

  // Columns 2 j and 2 j + 1 of the thread's share of the result, packed.
  static __device__ __forceinline__ uint32_t Finish(const float (&acc)[128], int j) {
    return ptx::PackBf16(ptx::Silu(acc[2 * j]) * acc[64 + 2 * j],
                         ptx::Silu(acc[2 * j + 1]) * acc[65 + 2 * j]);
  }
  static __device__ __forceinline__ void StoreChunk(const ForwardMaps& maps, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    ptx::TmaStore(maps.h_out, staging, item.n * kGateUpColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

// o = h Wd: 128 rows x 256 columns.
struct DownStep {
  static constexpr int kStep = 1;
  static constexpr Part kPart = kDown;
  static constexpr int kOutChunks = kDownColumns / 64;

  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p) { return p.I / kBlockK; }
  // Waits for all columns of the tile's h.
  static __device__ __forceinline__ bool IsReady(const ForwardParams& p, int tile) {
    const uint32_t all = (p.I + kGateUpColumns - 1) / kGateUpColumns;
    return ptx::LoadAcquire(p.counters.h_done + tile) >= all;
  }
  static __device__ __forceinline__ uint32_t* Done(const ForwardParams& p, int tile) {
    return p.counters.o_done + tile;
  }

  static __device__ __forceinline__ void LoadStage(const ForwardMaps& maps, const ForwardParams& p,
                                                   const TileItem& item, int k, uint32_t stage,
                                                   uint32_t barrier) {
    ptx::TmaLoad(stage, maps.h_rows, barrier, k * kBlockK, item.row, ptx::kEvictNormal);
    ptx::TmaLoad(stage + kStageABytes, maps.w_down, barrier, 0, item.expert * p.I + k * kBlockK,
                 item.n * 4, ptx::kEvictLast);
  }

  static __device__ __forceinline__ uint32_t Finish(const float (&acc)[128], int j) {
    return ptx::PackBf16(acc[2 * j], acc[2 * j + 1]);
  }
  static __device__ __forceinline__ void StoreChunk(const ForwardMaps& maps, const TileItem& item,
                                                    int consumer, int chunk, uint32_t staging) {
    ptx::TmaStore(maps.o_out, staging, item.n * kDownColumns + chunk * 64,
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
