// The first step of the backward, over pool rows: the gradients of gate and up.
#pragma once

#include <type_traits>

#include "comm/wait.cuh"
#include "kernel/activation.cuh"
#include "kernel/biases.cuh"
#include "kernel/gate_up.cuh"
#include "kernel/steps.cuh"
#include "pipeline/mutation.cuh"
#include "shared/backward.h"

namespace megamoe {

// x [Wg | Wu], as in the forward: of 128 columns of each, the first or the second of an item.
template <int kHalf>
struct RecomputeProduct : TokenProduct<> {
  static __device__ __forceinline__ int NumKBlocks(const BackwardParams& p, const TileItem& item) {
    // Of a wide item as its first block, whose last columns may exist when the peer's do not: each
    // loads half of the rows for both.
    const int n = item.is_wide ? item.n / 2 * 2 : item.n;
    return 2 * n + kHalf < NumGateUpTiles(p) ? p.H / kBlockK : 0;
  }
  static __device__ __forceinline__ int Tile(const TileItem& item) { return 2 * item.n + kHalf; }

  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadPoolRows<kForBoth>(maps.x, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams& p, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadGateOrUp<kForBoth>(maps, p, item, Tile(item), half, k, to, barrier);
  }
};

// dh = dy Wd^T: the rows of Wd are the columns of dh.
struct DgradDownProduct : TokenProduct<ptx::Major::kK> {
  static __device__ __forceinline__ int NumKBlocks(const BackwardParams& p, const TileItem&) {
    return p.H / kBlockK;
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadRows(const BackwardMaps& maps, const BackwardParams&,
                                                  const TileItem& item, int half, int k,
                                                  uint32_t to, uint32_t barrier) {
    LoadPoolRows<kForBoth>(maps.dy, item, half, k, to, barrier);
  }
  template <bool kForBoth>
  static __device__ __forceinline__ void LoadColumns(const BackwardMaps& maps,
                                                     const BackwardParams&, const TileItem& item,
                                                     int half, int k, uint32_t to,
                                                     uint32_t barrier) {
    LoadBox<kForBoth>(to, maps.w_down_by_rows, barrier, ptx::kEvictLast, k * kBlockK,
                      item.n * kDgradDownColumns + half * 128,
                      item.expert + HasFault(SeededFault::kWeightsOfNextExpert));
  }
};

// d(g, u) = w dh (dh/dg, dh/du), for SwiGLU w dh (silu'(g) u, silu(g)), w h and the tile's share of
// dw = <h, dh>: 128 rows x 256 columns of each. g and u are what the forward has kept, or computed
// again, 128 columns of both at a time, and rounded to the same bits. They do not fit into the
// registers beside dh.
//
// With biases dw is <h, dh> + <dy, b_down>: the first column tile of a row reads dy beside the
// products of dh. It also keeps the router weights of its rows, for the gradient of b_down.
template <bool kKeptGateUp, typename Activation>
struct DgradDownStep : TokenStep {
  using Parts = GateUpParts<std::conditional_t<kKeptGateUp, KeptGateUp, OwnGateUp>>;
  // What comes before dh, each of which Keep takes.
  using Before = std::conditional_t<kKeptGateUp, ProductList<>,
                                    ProductList<RecomputeProduct<0>, RecomputeProduct<1>>>;
  using Result = DgradDownProduct;
  using Products = typename Before::template With<Result, Parts>;
  static constexpr bool kHasFinish = true;
  static constexpr bool kMakesGateUp = !kKeptGateUp;
  static constexpr bool kReadsStages = Activation::kIsGeneral;
  static constexpr int kStep = 0;
  static constexpr Part kPart = kDgradDown;
  // 64 columns of dg, of w h and of du, then the next 64.
  static constexpr int kOutChunks = 3 * Parts::kParts;

  static __device__ __forceinline__ int NumColumnTiles(const BackwardParams& p) {
    return NumDgradDownTiles(p);
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
  struct RowsWithDots : Rows {
    bool is_first;  // column tile, and there are biases
    RowDots dots;

    __device__ __forceinline__ bool reads() const { return is_first; }
  };
  using Begun = std::conditional_t<kReadsStages, RowsWithDots, Rows>;

  static __device__ __forceinline__ Begun Begin(const BackwardParams& p, const TileItem& item,
                                                int consumer) {
    const int row = item.row + consumer * kConsumerRows + ThreadRow();
    const Rows rows = {row, {p.plan.row_slot[row], p.plan.row_slot[row + 8]}, {0, 0}};
    if constexpr (kReadsStages) {
      return {rows, p.biases.down != nullptr && item.n == 0, {}};
    } else {
      return rows;
    }
  }
  static __device__ __forceinline__ void LoadForStage(const BackwardParams& p, const TileItem& item,
                                                      int k, Begun& begun) {
    if (k < p.H / kBlockK)
      begun.dots.Load(p.biases.down + int64_t{item.expert} * p.H + k * kBlockK);
  }
  static __device__ __forceinline__ void ReadStage(int consumer, uint32_t stage, Begun& begun) {
    begun.dots.Add(stage + consumer * ptx::kChunkBytes);
  }
  static __device__ __forceinline__ void EndStages(const BackwardParams& p, const TileItem&, int,
                                                   Begun& begun) {
    if (!begun.reads()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      AddLanes(begun.dots.of[i]);
      if (ThreadAnew() % 4 == 0) {
        p.bias_rows[begun.row + 8 * i] = {begun.dots.of[i], begun.weight[i]};
      }
    }
  }

  // Before and behind the product of 128 columns of g and of u.
  template <int kHalf>
  static __device__ __forceinline__ auto BeginBefore(RecomputeProduct<kHalf>,
                                                     const BackwardParams& p,
                                                     const TileItem& item) {
    if constexpr (kReadsStages) {
      return TileBiases::OfGateUp(p.biases, p, item.expert, RecomputeProduct<kHalf>::Tile(item));
    } else {
      return TokenStep::Nothing();
    }
  }
  template <int kHalf, typename Begun>
  static __device__ __forceinline__ void Keep(RecomputeProduct<kHalf>, const BackwardParams& p,
                                              const TileItem& item, int consumer,
                                              const Begun& biases, float (&acc)[128]) {
    if constexpr (kReadsStages) biases.AddTo(acc);
    constexpr RowBits kAll = {{~0u, ~0u}};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int part = 2 * kHalf + i;
      if (!Parts::Exists(p, item, part)) return;
#pragma unroll
      for (int v = 0; v < kPartVectors; ++v) {
        const float* g = acc + 32 * i + 8 * v;
        Parts::Store(p, item.row / kConsumerRows + consumer, item.n * Parts::kParts + part, v,
                     PackSums(g, kAll), PackSums(g + 64, kAll));
      }
    }
  }

  // stages.Next(): the address of the next stage, when it is full; stages.Release() gives it back,
  // behind a fence: staging.Close has one.
  //
  // A loop, in which dh moves to where the code finds it: the code for 128 columns of an activation
  // that is not SwiGLU comes from a cache too slow for it, and the finish took twice as long.
  template <typename Stages>
  static __device__ __forceinline__ void Finish(const BackwardParams& p, const TileItem& item,
                                                int consumer, const Rows& rows, float (&dh)[128],
                                                Staging& staging, Stages stages) {
    float dw[2] = {0, 0};
#pragma unroll 1
    for (int part = 0; part < Parts::kParts; ++part) {
      const uint32_t stage = stages.Next();
      const uint32_t from = stage + consumer * kPartBytes + Parts::ThreadBytes(ThreadAnew());
      if (Parts::Exists(p, item, part)) {
#pragma unroll kVectorsAtOnce
        for (int v = 0; v < kPartVectors; ++v) {
          FinishColumns(p, rows, dh + (kVectorsAtOnce > 1 ? 8 * v : 0), dw, from, v,
                        staging.Columns(ThreadAnew()), staging);
          if (kVectorsAtOnce == 1) MoveToFront<8, 32>(dh);
        }
        MoveToFront<32, 128>(dh);
      } else {
        OpenAll(staging);
      }
      staging.Close(kDg);
      stages.Release();
      // Before the last buffer is handed over: the store warp publishes the tile behind it.
      if (part + 1 == Parts::kParts) WriteDw(p, item, consumer, dw);
      staging.Close(kWh);
      staging.Close(kDu);
    }
  }

  static __device__ __forceinline__ void StoreChunk(const BackwardMaps& maps, const BackwardParams&,
                                                    const TileItem& item, int consumer, int chunk,
                                                    uint32_t staging) {
    const int which = chunk % 3;
    const CUtensorMap& map = which == 0 ? maps.dg : which == 1 ? maps.wh : maps.du;
    ptx::TmaStore(map, staging, item.n * kDgradDownColumns + chunk / 3 * kPartColumns,
                  item.row + consumer * kConsumerRows);
  }

 protected:
  // The buffer of each kind of chunk. The store warp frees one while it waits for the next.
  enum Buffer { kDg, kWh, kDu };
  static_assert(kStagingBuffers == 3);
  static __device__ __forceinline__ void OpenAll(Staging& staging) {
    staging.Open(kDg);
    staging.Open(kWh);
    staging.Open(kDu);
  }

  // Vectors of g and u, 16 columns each, that are finished by code of their own.
  static constexpr int kVectorsAtOnce = Activation::kIsGeneral ? 1 : kPartVectors;

  // The 16 columns of vector v of a part, and of dh. from: the part; to: see Staging::Columns.
  static __device__ __forceinline__ void FinishColumns(const BackwardParams& p, const Rows& rows,
                                                       const float* dh, float (&dw)[2],
                                                       uint32_t from, int v, uint32_t to,
                                                       Staging& staging) {
    const Columns columns = ColumnsOf(p, rows, dh, dw, from, v);
    if (v == 0) OpenAll(staging);  // as late as can be
    Staging::PutAt(to, kDg, v, columns.dg);
    Staging::PutAt(to, kWh, v, columns.wh);
    Staging::PutAt(to, kDu, v, columns.du);
  }

  // Of 16 columns, as a product leaves them, in bf16.
  struct Columns {
    uint32_t dg[4], wh[4], du[4];
  };
  static __device__ __forceinline__ Columns ColumnsOf(const BackwardParams& p, const Rows& rows,
                                                      const float* dh, float (&dw)[2],
                                                      uint32_t from, int v) {
    const uint4 g = ptx::LoadShared(from + v * kPartVectorBytes);
    const uint4 u = ptx::LoadShared(from + v * kPartVectorBytes + ptx::kChunkBytes);
    const uint32_t gs[4] = {g.x, g.y, g.z, g.w};
    const uint32_t us[4] = {u.x, u.y, u.z, u.w};
    Columns columns;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = i % 2;
      const float w = rows.weight[r];
      const uint32_t mask = rows.Mask(r);
      const Gradient low =
          GradientOf(p, ptx::LowBf16(gs[i]), ptx::LowBf16(us[i]), w, dh[2 * i], dw[r]);
      const Gradient high =
          GradientOf(p, ptx::HighBf16(gs[i]), ptx::HighBf16(us[i]), w, dh[2 * i + 1], dw[r]);
      columns.dg[i] = ptx::PackBf16(low.dg, high.dg) & mask;
      columns.wh[i] = ptx::PackBf16(low.wh, high.wh) & mask;
      columns.du[i] = ptx::PackBf16(low.du, high.du) & mask;
      // Half of the columns at a time, where all of them need more registers than there are.
      if (Activation::kIsGeneral && i == 1) ptx::EndBlock();
    }
    return columns;
  }

  // The first kAll values begin with what lay behind kBy of them.
  template <int kBy, int kAll>
  static __device__ __forceinline__ void MoveToFront(float (&v)[128]) {
#pragma unroll
    for (int i = 0; i + kBy < kAll; ++i) v[i] = v[i + kBy];
  }

  struct Gradient {
    float dg, du, wh;
  };
  // Of one element; adds its share to dw.
  static __device__ __forceinline__ Gradient GradientOf(const BackwardParams& p, float g, float u,
                                                        float w, float dh, float& dw) {
    const Slopes slopes = Activation::WithSlopes(p.unit, g, u);
    const float h = slopes.h();
    dw = fmaf(HasFault(SeededFault::kDwWeighted) ? w * h : h, dh, dw);
    const float wdh = w * dh;
    return {slopes.dg(wdh), slopes.du(wdh), HasFault(SeededFault::kDwDownUnweighted) ? h : w * h};
  }

  // dw: of the thread's columns, in its two rows.
  static __device__ __forceinline__ void WriteDw(const BackwardParams& p, const TileItem& item,
                                                 int consumer, float (&dw)[2]) {
    const int row = item.row + consumer * kConsumerRows + ThreadRow();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      AddLanes(dw[i]);
      if (ThreadAnew() % 4 == 0) {
        p.dw_partial[int64_t{row + 8 * i} * NumDgradDownTiles(p) + item.n] = dw[i];
      }
    }
  }
  // Over the four lanes of a row.
  static __device__ __forceinline__ void AddLanes(float& sum) {
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
  }
};

}  // namespace megamoe
