// What the roles need to know of the backward.
#pragma once

#include <type_traits>

#include "comm/wait.cuh"
#include "kernel/dgrad_down_step.cuh"
#include "kernel/dgrad_gate_up_step.cuh"
#include "kernel/token_sums.cuh"
#include "kernel/wgrad_steps.cuh"
#include "pipeline/mutation.cuh"
#include "shared/backward.h"

namespace megamoe {

// Gradients: how those of the weights are stored. kTakesGateUp: the forward has kept g and u.
// kWithPeers, Activation: as in the forward.
template <typename Gradients, bool kTakesGateUp, bool kWithPeers, typename Activation>
struct BackwardSteps : TokenSums<kWithPeers, BackwardParams> {
  using Params = BackwardParams;
  using Maps = BackwardMaps;
  using DgradDown = DgradDownStep<kTakesGateUp, Activation>;
  using WgradDown = std::conditional_t<Activation::kIsGeneral, BiasedWgradDownStep<Gradients>,
                                       WgradDownStep<Gradients>>;
  using WgradGateUp = std::conditional_t<Activation::kIsGeneral, BiasedWgradGateUpStep<Gradients>,
                                         WgradGateUpStep<Gradients>>;

  static constexpr uint32_t kProductParts = kDgradDown | kDgradGateUp | kWgradDown | kWgradGateUp;
  // Registers of a thread: the first warpgroup gives some to the two that multiply.
  static constexpr int kServiceRegisters = 120;
  static constexpr int kMultiplyRegisters = 192;
  // Accumulators that stayed in place would take the registers in which one step finishes.
  static constexpr bool kKeepsAccumulators = false;

  template <typename F>
  static __device__ __forceinline__ void With(int step, F&& f) {
    WithStep<DgradDown, DgradGateUpStep, WgradDown, WgradGateUp>(step, f);
  }

  // ---- dispatch: x and dy, each to its pool ----

  static constexpr int kDispatched = 2;
  static constexpr int kZeroedArrays = 2;
  static __device__ __forceinline__ const uint4* DispatchFrom(const Params& p, int i, int token) {
    return BackwardSteps::RowOf(p, i == 0 ? p.x : p.dy, i == 0 ? p.peers.x : p.peers.dy, token,
                                BackwardSteps::DispatchedStride(p, i));
  }
  static __device__ __forceinline__ uint4* DispatchTo(const Params& p, int i) {
    return i == 0 ? p.x_pool : p.dy_pool;
  }
  static __device__ __forceinline__ void ZeroUnused(const Params&, int, int) {}

  // ---- combine: dx is the plain sum of a token's rows; dw of a route that of its column tiles, in
  // their order ----

  static __device__ __forceinline__ Flag RowsDone(const Params& p, int tile) {
    return {p.dx_done + tile, static_cast<uint32_t>(NumDownTiles(p)), Phase::kDgradGateUp};
  }
  static __device__ __forceinline__ const uint4* Rows(const Params& p) { return p.dx_pool; }
  static __device__ __forceinline__ uint4* Sums(const Params& p) { return p.dx; }
  static __device__ __forceinline__ uint4* SumsOf(const Params& p, int token) {
    return BackwardSteps::SumsRow(p, p.dx, token);
  }
  static __device__ __forceinline__ float Weight(const Params& p, int slot) {
    return HasFault(SeededFault::kDxWeighted) ? p.expert_weight[slot] : 1;
  }
  // What dx of the row waited for includes its dw. row: -1 for no route here.
  static __device__ __forceinline__ void FinishRoute(const Params& p, int slot, int row) {
    const int num_tiles = NumDgradDownTiles(p);
    const float* partial = p.dw_partial + int64_t{row} * num_tiles;
    float dw = 0;
    if (row >= 0) {
      for (int n = 0; n < num_tiles; ++n) dw += partial[n];
      if constexpr (Activation::kIsGeneral) {
        if (p.bias_rows != nullptr) dw += p.bias_rows[row].x;
      }
    }
    if constexpr (kWithPeers) {
      const int of_rank = p.dims.T * p.dims.K;
      if (row < 0) return;
      p.peers.dw[slot / of_rank][slot % of_rank] = dw;
      BackwardSteps::template Count<&PeerTraffic::dw_sent>(p, slot / p.dims.K, sizeof(dw));
    } else {
      p.dw[slot] = dw;
    }
  }
  // dw of a route of this rank's tokens, which its owner has sent.
  static __device__ __forceinline__ void TakeRoute(const Params& p, int slot, bool is_route) {
    p.dw[slot] = is_route ? p.peers.dw[p.wait.rank][slot] : 0;
  }
};

}  // namespace megamoe
