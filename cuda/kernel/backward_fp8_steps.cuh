// The backward with precision="fp8_block": what differs from that in bf16.
//
// g, u, dh and dx are products of FP8 codes; the gradients of the weights are products of what was
// not quantised, in bf16. So x and dy come to the pools both ways, and dg and du leave both ways.
#pragma once

#include <type_traits>

#include "kernel/backward_steps.cuh"
#include "kernel/fp8_product.cuh"
#include "kernel/fp8_scale.cuh"
#include "shared/backward_fp8.h"

namespace megamoe {

// x [Wg | Wu], as in the forward: of 128 columns of each, the first or the second of an item.
template <int kHalf>
struct Fp8RecomputeProduct : Fp8Product<&Fp8BackwardMaps::x_codes, &Fp8BackwardParams::x_rows> {
  using Bf16Product = RecomputeProduct<kHalf>;
  static __device__ __forceinline__ int NumKBlocks(const Fp8BackwardParams& p,
                                                   const TileItem& item) {
    return Bf16Product::NumKBlocks(p, item) > 0 ? KBlocks(p) : 0;
  }
  static __device__ __forceinline__ int KBlocks(const Fp8BackwardParams& p) {
    return CodeBlocks(p.H);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const Fp8BackwardMaps& maps,
                                                     const Fp8BackwardParams& p,
                                                     const TileItem& item, int half, int k,
                                                     uint32_t to, uint32_t barrier) {
    LoadBox<kForBoth>(to, half == 0 ? maps.gate_by_columns : maps.up_by_columns, barrier,
                      ptx::kEvictLast, k * kBlockCodesK,
                      item.expert * p.I + Bf16Product::Tile(item) * kGateUpColumns);
  }
  static __device__ __forceinline__ const float* Scale(const Fp8BackwardParams& p,
                                                       const TileItem& item, int half, int k) {
    return GateUpScale(p, item.expert, Bf16Product::Tile(item), half, k);
  }
};

// dh = dy Wd^T.
struct Fp8DgradDownProduct : Fp8Product<&Fp8BackwardMaps::dy_codes, &Fp8BackwardParams::dy_rows> {
  static __device__ __forceinline__ int NumKBlocks(const Fp8BackwardParams& p, const TileItem&) {
    return KBlocks(p);
  }
  static __device__ __forceinline__ int KBlocks(const Fp8BackwardParams& p) {
    return CodeBlocks(p.H);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const Fp8BackwardMaps& maps,
                                                     const Fp8BackwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadWeight<kForBoth>(maps.down_by_rows, item, half, k, to, barrier);
  }
  static __device__ __forceinline__ const float* Scale(const Fp8BackwardParams& p,
                                                       const TileItem& item, int half, int k) {
    const int rows = CodeBlocks(p.I);
    return Block(p.scales.down, item.expert, rows, CodeBlocks(p.H), ColumnBlock(item, half, rows),
                 k);
  }
};

// dg Wg^T + du Wu^T: first the K-blocks of gate, then those of up.
struct Fp8DgradGateUpProduct : Fp8Product<&Fp8BackwardMaps::dz_codes, &Fp8BackwardParams::dz_rows> {
  static __device__ __forceinline__ int NumKBlocks(const Fp8BackwardParams& p, const TileItem&) {
    return KBlocks(p);
  }
  static __device__ __forceinline__ int KBlocks(const Fp8BackwardParams& p) {
    return 2 * CodeBlocks(p.I);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const Fp8BackwardMaps& maps,
                                                     const Fp8BackwardParams& p,
                                                     const TileItem& item, int half, int k,
                                                     uint32_t to, uint32_t barrier) {
    const int of_up = k - CodeBlocks(p.I);
    LoadWeight<kForBoth>(of_up < 0 ? maps.gate_by_rows : maps.up_by_rows, item, half,
                         of_up < 0 ? k : of_up, to, barrier);
  }
  static __device__ __forceinline__ const float* Scale(const Fp8BackwardParams& p,
                                                       const TileItem& item, int half, int k) {
    const int rows = CodeBlocks(p.H), columns = CodeBlocks(p.I);
    const int of_up = k - columns;
    return Block(of_up < 0 ? p.scales.gate : p.scales.up, item.expert, rows, columns,
                 ColumnBlock(item, half, rows), of_up < 0 ? k : of_up);
  }
};

// dg, du and w h as in bf16, and beside them the codes of dg and du: 128 columns of a tile are one
// group of each row.
template <bool kKeptGateUp>
struct Fp8DgradDownStep : DgradDownStep<kKeptGateUp, SwiGlu> {
  using Bf16Step = DgradDownStep<kKeptGateUp, SwiGlu>;
  using typename Bf16Step::Columns;
  using typename Bf16Step::Parts;
  using typename Bf16Step::Rows;
  using Before = std::conditional_t<kKeptGateUp, ProductList<>,
                                    ProductList<Fp8RecomputeProduct<0>, Fp8RecomputeProduct<1>>>;
  using Result = Fp8DgradDownProduct;
  using Products = typename Before::template With<Result, Parts>;
  static constexpr bool kIsOfCodes = true;
  static constexpr int kAnnounceAhead = kCodesAnnounceAhead;
  // Of each 128 columns: 64 of dg, of w h and of du, the next 64, the codes of dg and those of du.
  static constexpr int kGroups = kDgradDownColumns / kFp8Group;
  static constexpr int kGroupParts = kFp8Group / kPartColumns;
  static constexpr int kPartChunks = 3;
  static constexpr int kCodesOfDg = kGroupParts * kPartChunks;
  static constexpr int kCodesOfDu = kCodesOfDg + 1;
  static constexpr int kGroupChunks = kCodesOfDu + 1;
  static constexpr int kOutChunks = kGroups * kGroupChunks;

  template <int kHalf>
  static __device__ __forceinline__ auto BeginBefore(Fp8RecomputeProduct<kHalf>,
                                                     const BackwardParams& p,
                                                     const TileItem& item) {
    return Bf16Step::BeginBefore(RecomputeProduct<kHalf>(), p, item);
  }
  template <int kHalf, typename Begun>
  static __device__ __forceinline__ void Keep(Fp8RecomputeProduct<kHalf>, const BackwardParams& p,
                                              const TileItem& item, int consumer,
                                              const Begun& begun, float (&acc)[128]) {
    Bf16Step::Keep(RecomputeProduct<kHalf>(), p, item, consumer, begun, acc);
  }

  // What Begin reads, in one register: the four lanes of a thread's two rows have the router's
  // weights of both, then the slots.
  struct LaneRow {
    uint32_t held;

    __device__ __forceinline__ void ReadMore(const BackwardParams& p) {
      if (ThreadAnew() % 4 >= 2) return;
      const int slot = static_cast<int>(held);
      held = slot >= 0 ? __float_as_uint(p.expert_weight[slot]) : 0;
    }
    __device__ __forceinline__ Rows OfThread(const TileItem& item, int consumer) const {
      Rows rows;
      rows.row = item.row + consumer * kConsumerRows + ThreadRow();
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int lane = ThreadAnew() % kWarpThreads / 4 * 4 + i;
        rows.weight[i] = __uint_as_float(__shfl_sync(kAllLanes, held, lane));
        rows.slot[i] = static_cast<int>(__shfl_sync(kAllLanes, held, lane + 2));
      }
      return rows;
    }
  };
  static __device__ __forceinline__ LaneRow BeginLane(const BackwardParams& p, const TileItem& item,
                                                      int consumer) {
    const int row = item.row + consumer * kConsumerRows + ThreadRow() + ThreadAnew() % 2 * 8;
    return {static_cast<uint32_t>(p.plan.row_slot[row])};
  }

  // As in bf16, 128 columns at a time: their dg and du are kept till their scales are known.
  template <typename Stages>
  static __device__ __forceinline__ void Finish(const Fp8BackwardParams& p, const TileItem& item,
                                                int consumer, const Rows& rows, float (&dh)[128],
                                                Staging& staging, Stages stages) {
    float dw[2] = {0, 0};
#pragma unroll 1
    for (int group = 0; group < kGroups; ++group) {
      const int chunk = group * kGroupChunks;
      const bool exists = Parts::Exists(p, item, group * kGroupParts);
      Codes dg = {}, du = {};
#pragma unroll
      for (int part = 0; part < kGroupParts; ++part) {
        const int first = chunk + part * kPartChunks;
        const uint32_t stage = stages.Next();
        const uint32_t from = stage + consumer * kPartBytes + Parts::ThreadBytes(ThreadAnew());
#pragma unroll
        for (int v = 0; v < kPartVectors; ++v) {
          Columns columns = {};
          if (exists) {
            columns = Bf16Step::ColumnsOf(p, rows, dh + 32 * part + 8 * v, dw, from, v);
          }
          if (v == 0) {
            for (int i = 0; i < kPartChunks; ++i) staging.Open(first + i);
          }
          const uint32_t to = staging.Columns(ThreadAnew());
          Staging::PutAt(to, first, v, columns.dg);
          Staging::PutAt(to, first + 1, v, columns.wh);
          Staging::PutAt(to, first + 2, v, columns.du);
          dg.Take(part * kPartVectors + v, columns.dg);
          du.Take(part * kPartVectors + v, columns.du);
        }
        staging.Close(first);
        stages.Release();
        staging.Close(first + 1);
        staging.Close(first + 2);
      }
      Bf16Step::template MoveToFront<kFp8Group / 2, 128>(dh);
      // Before the last buffer is handed over: the store warp publishes the tile behind it.
      if (group + 1 == kGroups) Bf16Step::WriteDw(p, item, consumer, dw);
      const int block = item.n * kGroups + group;
      dg.Put(p, item, consumer, block, exists, staging, chunk + kCodesOfDg);
      du.Put(p, item, consumer, CodeBlocks(p.I) + block, exists, staging, chunk + kCodesOfDu);
    }
  }

  static __device__ __forceinline__ void StoreChunk(const Fp8BackwardMaps& maps,
                                                    const Fp8BackwardParams& p,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    const int group = chunk / kGroupChunks, of_group = chunk % kGroupChunks;
    const int row = item.row + consumer * kConsumerRows;
    const int column = item.n * kDgradDownColumns + group * kFp8Group;
    if (of_group < kCodesOfDg) {
      const int which = of_group % kPartChunks;
      const CUtensorMap& map = which == 0 ? maps.dg : which == 1 ? maps.wh : maps.du;
      ptx::TmaStore(map, staging, column + of_group / kPartChunks * kPartColumns, row);
    } else if (column < p.I) {  // behind them lie the codes of du
      ptx::TmaStore(maps.dz_codes, staging, column + (of_group == kCodesOfDu ? p.I : 0), row);
    }
  }

 private:
  // The bf16 of a thread's two rows x 128 columns, and their largest magnitudes.
  struct Codes {
    uint32_t words[kGroupParts * kPartVectors][4];
    uint32_t largest[2];  // two bf16 each, of a row

    __device__ __forceinline__ void Take(int v, const uint32_t (&columns)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[v][i] = columns[i];
        // Of bits without a sign the order is that of the magnitudes, with NaN behind all.
        largest[i % 2] = __vmaxu2(largest[i % 2], columns[i] & 0x7fff7fffu);
      }
    }

    // Writes the scales, and the codes as a chunk. block: in a row of dz.
    __device__ __forceinline__ void Put(const Fp8BackwardParams& p, const TileItem& item,
                                        int consumer, int block, bool exists, Staging& staging,
                                        int chunk) const {
      const int row = item.row + consumer * kConsumerRows + ThreadRow();
      float* const scales = p.dz_rows.first + int64_t{row} * p.dz_rows.row_floats + block;
      float inverse[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const uint32_t bits = max(largest[r] << 16, largest[r] & 0xffff0000u);
        const Fp8Scale scale = Fp8Scale::Of(LargestOfRow(__uint_as_float(bits)));
        inverse[r] = scale.inverse;
        if (exists && ThreadAnew() % 4 == 0) scales[r * 8 * p.dz_rows.row_floats] = scale.scale;
      }
      staging.Open(chunk);
#pragma unroll
      for (int j = 0; j < kFp8Group / 8; ++j) {
        const uint32_t (&w)[4] = words[j / 2];
        staging.PutCodes(chunk, j, CodesOf(w[j % 2 * 2], inverse[0]),
                         CodesOf(w[j % 2 * 2 + 1], inverse[1]));
      }
      staging.Close(chunk);
    }
    static __device__ __forceinline__ uint16_t CodesOf(uint32_t word, float inverse) {
      return ptx::PackE4m3(ptx::MultiplyFlushed(ptx::LowBf16(word), inverse),
                           ptx::MultiplyFlushed(ptx::HighBf16(word), inverse));
    }
  };
};

struct Fp8DgradGateUpStep : DgradGateUpStep {
  using Products = ProductList<Fp8DgradGateUpProduct>;
  static constexpr bool kIsOfCodes = true;
  static constexpr int kAnnounceAhead = kCodesAnnounceAhead;
};

// What the roles need to know of this backward.
template <typename Gradients, bool kTakesGateUp, bool kWithPeers>
struct Fp8BackwardSteps : BackwardSteps<Gradients, kTakesGateUp, kWithPeers, SwiGlu> {
  using Bf16Steps = BackwardSteps<Gradients, kTakesGateUp, kWithPeers, SwiGlu>;
  using Params = Fp8BackwardParams;
  using Maps = Fp8BackwardMaps;
  using DgradDown = Fp8DgradDownStep<kTakesGateUp>;

  static constexpr int kLaneColumns = CodeNeeds::LaneColumns(kWithPeers);
  static constexpr int kServiceRegisters = CodeNeeds::kServiceRegisters;
  static constexpr int kMultiplyRegisters = CodeNeeds::kMultiplyRegisters;
  static constexpr bool kFewRegisters = true;

  template <typename F>
  static __device__ __forceinline__ void With(int step, F&& f) {
    WithStep<DgradDown, Fp8DgradGateUpStep, typename Bf16Steps::WgradDown,
             typename Bf16Steps::WgradGateUp>(step, f);
  }

  // ---- dispatch: x and dy as products over rows take them, then the codes of dy and, where g and
  // u are computed again, of x ----

  static constexpr int kDispatched = kTakesGateUp ? 3 : 4;
  static __device__ __forceinline__ int DispatchedBytes(const Params& p, int i) {
    return i < Bf16Steps::kDispatched ? Bf16Steps::DispatchedBytes(p, i) : CopiedCodeBytes(p.H);
  }
  static __device__ __forceinline__ int DispatchedStride(const Params& p, int i) {
    return i < Bf16Steps::kDispatched ? Bf16Steps::DispatchedStride(p, i) : CodeRowBytes(p.H);
  }
  static __device__ __forceinline__ const uint4* DispatchFrom(const Params& p, int i, int token) {
    if (i < Bf16Steps::kDispatched) return Bf16Steps::DispatchFrom(p, i, token);
    const bool is_dy = i == Bf16Steps::kDispatched;
    return Bf16Steps::RowOf(p, is_dy ? p.dy_codes : p.x_codes,
                            is_dy ? p.peers.dy_codes : p.peers.x_codes, token, CodeRowBytes(p.H));
  }
  static __device__ __forceinline__ uint4* DispatchTo(const Params& p, int i) {
    if (i < Bf16Steps::kDispatched) return Bf16Steps::DispatchTo(p, i);
    return reinterpret_cast<uint4*>(i == Bf16Steps::kDispatched ? p.dy_code_pool : p.x_code_pool);
  }
};

}  // namespace megamoe
