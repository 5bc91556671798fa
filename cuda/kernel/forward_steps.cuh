// The two GEMMs of the forward: what each reads, waits on, signals, and how its result is finished.
#pragma once

#include <type_traits>

#include "comm/wait.cuh"
#include "kernel/activation.cuh"
#include "kernel/biases.cuh"
#include "kernel/gate_up.cuh"
#include "kernel/steps.cuh"
#include "kernel/token_sums.cuh"
#include "shared/forward.h"

namespace megamoe {

// x [Wg | Wu].
struct GateUpProduct : TokenProduct<> {
  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p, const TileItem&) {
    return p.H / kBlockK;
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const ForwardMaps& maps, const ForwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadPoolRows<kForBoth>(maps.pool, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const ForwardMaps& maps,
                                                     const ForwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadGateOrUp<kForBoth>(maps, p, item, item.n, half, k, to, barrier);
  }
};

// h of g = x Wg and u = x Wu: 128 rows x (128 gate + the same 128 up) columns; g and u are dropped.
template <typename Activation>
struct PlainGateUpStep : TokenStep {
  using Products = ProductList<GateUpProduct>;
  static constexpr int kStep = 0;
  static constexpr Part kPart = kGateUp;
  static constexpr int kOutChunks = kGateUpColumns / 64;

  static __device__ __forceinline__ int NumColumnTiles(const ForwardParams& p) {
    return NumGateUpTiles(p);
  }
  // All rows of the tile, pads included.
  static __device__ __forceinline__ Flag Input(const ForwardParams& p, const TileItem& item) {
    return {p.counters.x_ready + item.row / kTileRows, kTileRows, Phase::kDispatch};
  }
  static __device__ __forceinline__ void Publish(const ForwardParams& p, const TileItem& item) {
    ptx::AddRelease(p.h_done + item.row / kTileRows, 1);
  }

  // Sixteen columns of a chunk.
  template <typename Begun>
  static __device__ __forceinline__ void PutColumns(const ForwardParams& p, const Begun&,
                                                    const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
    uint32_t packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = 32 * chunk + 8 * c + 2 * i;
      packed[i] = ptx::PackBf16(Activation::Value(p.unit, acc[j], acc[64 + j]),
                                Activation::Value(p.unit, acc[j + 1], acc[65 + j]));
    }
    staging.Put(chunk, c, packed);
  }
  static __device__ __forceinline__ void StoreChunk(const ForwardMaps& maps, const ForwardParams&,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    ptx::TmaStore(maps.h, staging, item.n * kGateUpColumns + chunk * 64,
                  item.row + consumer * kConsumerRows);
  }
};

// The same with biases.
template <typename Activation>
struct BiasedGateUpStep : PlainGateUpStep<Activation> {
  static __device__ __forceinline__ TileBiases Begin(const ForwardParams& p, const TileItem& item,
                                                     int) {
    return TileBiases::OfGateUp(p.biases, p, item.expert, item.n);
  }
  static __device__ __forceinline__ void Keep(const ForwardParams&, const TileItem&, int,
                                              const TileBiases&, const float (&)[128]) {}
  static __device__ __forceinline__ void PutColumns(const ForwardParams& p,
                                                    const TileBiases& biases,
                                                    const Staging& staging, float (&acc)[128],
                                                    int chunk, int c) {
    biases.AddTo(acc, chunk, c);
    biases.AddTo(acc, 2 + chunk, c);
    PlainGateUpStep<Activation>::PutColumns(p, biases, staging, acc, chunk, c);
  }
};

// The same with g and u kept.
template <typename Activation>
struct KeepingGateUpStep : PlainGateUpStep<Activation> {
  static __device__ __forceinline__ RowBits Begin(const ForwardParams& p, const TileItem& item,
                                                  int consumer) {
    return RowBits::Of(p, item, consumer);
  }
  static __device__ __forceinline__ void Keep(const ForwardParams& p, const TileItem& item,
                                              int consumer, const RowBits& rows,
                                              const float (&acc)[128]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* g = acc + 32 * half;
      KeepPart(p, item, consumer, half,
               [&](int of_u, int v) { return PackSums(g + 64 * of_u + 8 * v, rows); });
    }
  }
  static __device__ __forceinline__ void KeepPads(const ForwardParams& p, const TileItem& item,
                                                  int consumer) {
    for (int half = 0; half < 2; ++half) {
      KeepPart(p, item, consumer, half, [](int, int) { return uint4{0, 0, 0, 0}; });
    }
  }

 private:
  // Half of the columns; words(of_u, v): a vector of g or of u.
  template <typename F>
  static __device__ __forceinline__ void KeepPart(const ForwardParams& p, const TileItem& item,
                                                  int consumer, int half, F words) {
    const int columns = item.n * 2 + half;
    if (columns * kPartColumns >= p.I) return;
    uint4* part = KeptGateUp::Part(p.gate_up, p, item.row / kConsumerRows + consumer, columns);
#pragma unroll
    for (int v = 0; v < kPartVectors; ++v) KeptGateUp::Store(part, v, words(0, v), words(1, v));
  }
};

// The same with biases and with g and u kept.
template <typename Activation>
struct BiasedKeepingGateUpStep : KeepingGateUpStep<Activation> {
  using Unbiased = KeepingGateUpStep<Activation>;
  struct Begun {
    RowBits rows;
    TileBiases biases;
  };
  static __device__ __forceinline__ Begun Begin(const ForwardParams& p, const TileItem& item,
                                                int consumer) {
    return {RowBits::Of(p, item, consumer), TileBiases::OfGateUp(p.biases, p, item.expert, item.n)};
  }
  static __device__ __forceinline__ void Keep(const ForwardParams& p, const TileItem& item,
                                              int consumer, const Begun& begun, float (&acc)[128]) {
    begun.biases.AddTo(acc);
    Unbiased::Keep(p, item, consumer, begun.rows, acc);
  }
};

// h Wd.
struct DownProduct : TokenProduct<> {
  static __device__ __forceinline__ int NumKBlocks(const ForwardParams& p, const TileItem&) {
    return p.I / kBlockK;
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const ForwardMaps& maps, const ForwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadPoolRows<kForBoth>(maps.h, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const ForwardMaps& maps,
                                                     const ForwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.w_down, barrier, ptx::kEvictLast, 0, item.expert * p.I + k * kBlockK,
                      item.n * 4 + half * 2);
  }
};

// o = h Wd, in the place of x.
struct DownStep : HiddenRowsStep<&ForwardMaps::pool> {
  using Products = ProductList<DownProduct>;
  static constexpr int kStep = 1;
  static constexpr Part kPart = kDown;

  // All columns of the tile's h.
  static __device__ __forceinline__ Flag Input(const ForwardParams& p, const TileItem& item) {
    return {p.h_done + item.row / kTileRows, static_cast<uint32_t>(NumGateUpTiles(p)),
            Phase::kGateUp};
  }
  static __device__ __forceinline__ void Publish(const ForwardParams& p, const TileItem& item) {
    ptx::AddRelease(p.o_done + item.row / kTileRows, 1);
  }
};

// The same with biases.
struct BiasedDownStep : DownStep {
  static __device__ __forceinline__ TileBiases Begin(const ForwardParams& p, const TileItem& item,
                                                     int) {
    return TileBiases::OfDown(p.biases, p, item.expert, item.n);
  }
  static __device__ __forceinline__ void Keep(const ForwardParams&, const TileItem&, int,
                                              const TileBiases&, const float (&)[128]) {}
  static __device__ __forceinline__ void PutColumns(const ForwardParams&, const TileBiases& biases,
                                                    const Staging& staging, float (&acc)[128],
                                                    int chunk, int c) {
    biases.AddTo(acc, chunk, c);
    PutRounded(staging, acc, chunk, c);
  }
};

// The steps of an activation: kKeeps: g and u are kept.
template <typename Activation, bool kKeeps, bool kHasBiases = Activation::kIsGeneral>
struct ForwardStepsOf {
  using GateUp =
      std::conditional_t<kKeeps, KeepingGateUpStep<Activation>, PlainGateUpStep<Activation>>;
  using Down = DownStep;
};
template <typename Activation, bool kKeeps>
struct ForwardStepsOf<Activation, kKeeps, true> {
  using GateUp =
      std::conditional_t<kKeeps, BiasedKeepingGateUpStep<Activation>, BiasedGateUpStep<Activation>>;
  using Down = BiasedDownStep;
};

// What the roles need to know of the forward. kKeepsGateUp: it stores g and u for the backward.
// kWithPeers: of the experts other ranks have a share. Activation: see kernel/activation.cuh.
template <bool kKeepsGateUp, bool kWithPeers, typename Activation>
struct ForwardSteps : TokenSums<kWithPeers, ForwardParams> {
  using Params = ForwardParams;
  using Maps = ForwardMaps;
  using GateUp = typename ForwardStepsOf<Activation, kKeepsGateUp>::GateUp;
  using Down = typename ForwardStepsOf<Activation, kKeepsGateUp>::Down;

  static constexpr uint32_t kProductParts = kGateUp | kDown;
  // Registers of a thread: the first warpgroup gives some to the two that multiply.
  static constexpr int kServiceRegisters = 120;
  static constexpr int kMultiplyRegisters = 192;
  // Accumulators that stay in place from item to item need no instructions that clear them.
  static constexpr bool kKeepsAccumulators = true;

  template <typename F>
  static __device__ __forceinline__ void With(int step, F&& f) {
    WithStep<GateUp, Down>(step, f);
  }

  // ---- dispatch: x to the pool. Pads stay as they are, since a row of h and o depends on its own
  // row only ----

  static constexpr int kDispatched = 1;
  static constexpr int kZeroedArrays = 0;
  static __device__ __forceinline__ const uint4* DispatchFrom(const Params& p, int, int token) {
    return ForwardSteps::RowOf(p, p.x, p.peers.x, token, ForwardSteps::DispatchedStride(p, 0));
  }
  static __device__ __forceinline__ uint4* DispatchTo(const Params& p, int) { return p.pool; }
  // What is kept behind the last tile, a warp's share of it.
  static __device__ __forceinline__ void ZeroUnused(const Params& p, int warp, int num_warps) {
    if constexpr (kKeepsGateUp) {
      const int64_t row_vectors = 2 * p.I / kVector;
      const int64_t end = p.pool_rows * row_vectors;
      int64_t i = p.plan.expert_start[p.dims.experts_per_rank()] * row_vectors;
      i += warp * kWarpThreads + threadIdx.x % kWarpThreads;
      for (; i < end; i += num_warps * kWarpThreads) {
        ptx::StoreStreaming(p.gate_up + i, uint4{0, 0, 0, 0});
      }
    }
  }

  // ---- combine: the weighted sum of o ----

  static __device__ __forceinline__ Flag RowsDone(const Params& p, int tile) {
    return {p.o_done + tile, static_cast<uint32_t>(NumDownTiles(p)), Phase::kDown};
  }
  static __device__ __forceinline__ const uint4* Rows(const Params& p) { return p.pool; }
  static __device__ __forceinline__ uint4* Sums(const Params& p) { return p.y; }
  static __device__ __forceinline__ uint4* SumsOf(const Params& p, int token) {
    return ForwardSteps::SumsRow(p, p.y, token);
  }
  static __device__ __forceinline__ float Weight(const Params& p, int slot) {
    return p.expert_weight[slot];
  }
  static __device__ __forceinline__ void FinishRoute(const Params&, int, int) {}
  static __device__ __forceinline__ void TakeRoute(const Params&, int, bool) {}
};

}  // namespace megamoe
