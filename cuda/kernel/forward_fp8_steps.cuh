// The two GEMMs of the forward with precision="fp8_block": what differs from those in bf16.
//
// Operands are e4m3 codes, both K-major, in the same bytes of a stage. Each K-block of 128 is
// summed by itself and added, times the scales of both operands, to float32 sums.
#pragma once

#include "kernel/forward_steps.cuh"
#include "kernel/fp8_product.cuh"
#include "kernel/fp8_scale.cuh"
#include "shared/forward_fp8.h"
#include "shared/fp8.h"

namespace megamoe {

// x [Wg | Wu].
struct Fp8GateUpProduct : Fp8Product<&Fp8ForwardMaps::x, &Fp8ForwardParams::x_rows> {
  static __device__ __forceinline__ int NumKBlocks(const Fp8ForwardParams& p, const TileItem&) {
    return KBlocks(p);
  }
  static __device__ __forceinline__ int KBlocks(const Fp8ForwardParams& p) {
    return CodeBlocks(p.H);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const Fp8ForwardMaps& maps,
                                                     const Fp8ForwardParams& p,
                                                     const TileItem& item, int half, int k,
                                                     uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, half == 0 ? maps.w_gate : maps.w_up, barrier, ptx::kEvictLast,
                      k * kBlockCodesK, item.expert * p.I + item.n * kGateUpColumns);
  }
  static __device__ __forceinline__ const float* Scale(const Fp8ForwardParams& p,
                                                       const TileItem& item, int half, int k) {
    return GateUpScale(p, item.expert, item.n, half, k);
  }
};

// h Wd.
struct Fp8DownProduct : Fp8Product<&Fp8ForwardMaps::h, &Fp8ForwardParams::h_rows> {
  static __device__ __forceinline__ int NumKBlocks(const Fp8ForwardParams& p, const TileItem&) {
    return KBlocks(p);
  }
  static __device__ __forceinline__ int KBlocks(const Fp8ForwardParams& p) {
    return CodeBlocks(p.I);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const Fp8ForwardMaps& maps,
                                                     const Fp8ForwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadWeight<kForBoth>(maps.w_down, item, half, k, to, barrier);
  }
  static __device__ __forceinline__ const float* Scale(const Fp8ForwardParams& p,
                                                       const TileItem& item, int half, int k) {
    const int columns = CodeBlocks(p.H);
    return Block(p.scales.down, item.expert, CodeBlocks(p.I), columns, k,
                 ColumnBlock(item, half, columns));
  }
};

// h of g = x Wg and u = x Wu, as codes: the 128 columns of a tile are one group of each row.
template <bool kKeeps>
struct Fp8GateUpStep : ForwardStepsOf<SwiGlu, kKeeps>::GateUp {
  using Bf16Step = typename ForwardStepsOf<SwiGlu, kKeeps>::GateUp;
  using Products = ProductList<Fp8GateUpProduct>;
  static constexpr bool kIsOfCodes = true;
  static constexpr int kAnnounceAhead = kCodesAnnounceAhead;
  static constexpr int kOutChunks = 1;

  // Leaves what becomes the codes in the place of g.
  template <typename Begun>
  static __device__ __forceinline__ void Keep(const Fp8ForwardParams& p, const TileItem& item,
                                              int consumer, const Begun& begun, float (&acc)[128]) {
    Bf16Step::Keep(p, item, consumer, begun, acc);
    if constexpr (kKeeps) ptx::EndBlock();  // addresses of what is kept take registers
    float largest[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 64; ++j) {
      acc[j] = SwiGlu::Value(p.unit, acc[j], acc[64 + j]);
      largest[j / 2 % 2] = ptx::MaxOrNan(largest[j / 2 % 2], fabsf(acc[j]));
    }
    const int row = item.row + consumer * kConsumerRows + ThreadRow();
    float* const scales = p.h_rows.first + int64_t{row} * p.h_rows.row_floats + item.n;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const Fp8Scale scale = Fp8Scale::Of(LargestOfRow(largest[r]));
      // Before the buffer is handed over: the store warp publishes the tile behind it.
      if (threadIdx.x % 4 == 0) scales[r * 8 * p.h_rows.row_floats] = scale.scale;
#pragma unroll
      for (int j = 2 * r; j < 64; j += 4) {
        acc[j] = scale.Scaled(acc[j]);
        acc[j + 1] = scale.Scaled(acc[j + 1]);
      }
    }
  }

  // 32 columns of the chunk.
  template <typename Begun>
  static __device__ __forceinline__ void PutColumns(const Fp8ForwardParams&, const Begun&,
                                                    const Staging& staging, const float (&acc)[128],
                                                    int chunk, int c) {
#pragma unroll
    for (int j = 4 * c; j < 4 * c + 4; ++j) {
      staging.PutCodes(chunk, j, ptx::PackE4m3(acc[4 * j], acc[4 * j + 1]),
                       ptx::PackE4m3(acc[4 * j + 2], acc[4 * j + 3]));
    }
  }
};

// o = h Wd.
struct Fp8DownStep : DownStep {
  using Products = ProductList<Fp8DownProduct>;
  static constexpr bool kIsOfCodes = true;
  static constexpr int kAnnounceAhead = kCodesAnnounceAhead;
};

// What the roles need to know of this forward.
template <bool kKeepsGateUp, bool kWithPeers>
struct Fp8ForwardSteps : ForwardSteps<kKeepsGateUp, kWithPeers, SwiGlu> {
  using Params = Fp8ForwardParams;
  using Maps = Fp8ForwardMaps;
  using GateUp = Fp8GateUpStep<kKeepsGateUp>;
  using Down = Fp8DownStep;
  static constexpr int kLaneColumns = CodeNeeds::LaneColumns(kWithPeers);
  static constexpr int kServiceRegisters = CodeNeeds::kServiceRegisters;
  static constexpr int kMultiplyRegisters = CodeNeeds::kMultiplyRegisters;
  // What is kept between K-blocks are sums of scaled products, which begin with 0.
  static constexpr bool kKeepsAccumulators = false;
  static constexpr bool kFewRegisters = true;

  template <typename F>
  static __device__ __forceinline__ void With(int step, F&& f) {
    WithStep<GateUp, Down>(step, f);
  }

  static __device__ __forceinline__ int DispatchedBytes(const Params& p, int) {
    return CopiedCodeBytes(p.H);
  }
  static __device__ __forceinline__ int DispatchedStride(const Params& p, int) {
    return CodeRowBytes(p.H);
  }
  static __device__ __forceinline__ const uint4* DispatchFrom(const Params& p, int, int token) {
    return Fp8ForwardSteps::RowOf(p, p.x_codes, p.peers.x_codes, token, CodeRowBytes(p.H));
  }
  static __device__ __forceinline__ uint4* DispatchTo(const Params& p, int) {
    return reinterpret_cast<uint4*>(p.x_pool);
  }
};

}  // namespace megamoe
