#include "host/backward.h"

#include "host/tensor_map.h"
#include "kernel/backward.h"
#include "shared/backward.h"

namespace megamoe {
namespace {

constexpr int kHalfTile = kTileRows / 2;

CudaStatus MakePoolMaps(const BackwardCall& c, BackwardMaps* maps) {
  const auto pool = [&](void* data, int columns, CUtensorMap* map) {
    return RowsMap({data, c.pool_rows, columns}, kHalfTile, map);
  };
  return FirstFailure({
      pool(c.x_pool, c.H, &maps->x),
      pool(c.dy_pool, c.H, &maps->dy),
      pool(c.dg, c.I, &maps->dg),
      pool(c.du, c.I, &maps->du),
      pool(c.wh, c.I, &maps->wh),
      pool(c.dx_pool, c.H, &maps->dx),
  });
}

CudaStatus MakeWeightMaps(const BackwardCall& c, BackwardMaps* maps) {
  const int64_t experts = c.plan.dims.experts_per_rank();
  const Matrix gate = {const_cast<void*>(c.w_gate), c.H, c.I};
  const Matrix up = {const_cast<void*>(c.w_up), c.H, c.I};
  const Matrix down = {const_cast<void*>(c.w_down), c.I, c.H};
  return FirstFailure({
      ChunksMap({gate.data, experts * c.H, c.I}, 2, &maps->w_gate),
      ChunksMap({up.data, experts * c.H, c.I}, 2, &maps->w_up),
      StackedRowsMap(gate, experts, kDownColumns / 2, &maps->w_gate_by_rows),
      StackedRowsMap(up, experts, kDownColumns / 2, &maps->w_up_by_rows),
      StackedRowsMap(down, experts, kDgradDownColumns / 2, &maps->w_down_by_rows),
  });
}

CudaStatus MakeGradientMaps(const BackwardCall& c, BackwardMaps* maps) {
  if (c.dw_gate == nullptr) return {};
  const int64_t experts = c.plan.dims.experts_per_rank();
  const Element element = c.float_gradients ? Element::kF32 : Element::kBf16;
  return FirstFailure({
      RowsMap({c.dw_gate, experts * c.H, c.I, element}, kHalfTile, &maps->dw_gate),
      RowsMap({c.dw_up, experts * c.H, c.I, element}, kHalfTile, &maps->dw_up),
      RowsMap({c.dw_down, experts * c.I, c.H, element}, kHalfTile, &maps->dw_down),
  });
}

}  // namespace

int64_t NumBackwardCounters(int64_t pool_rows, int64_t experts) {
  return NumCounters(pool_rows, 3, experts);
}

CudaStatus MakeBackwardMaps(const BackwardCall& c, BackwardMaps* maps) {
  return FirstFailure({MakePoolMaps(c, maps), MakeGradientMaps(c, maps)});
}

BackwardParams BackwardParamsOf(const BackwardCall& c) {
  BackwardParams params = {};
  static_cast<LayerParams&>(params) = ParamsOf(c);
  params.dz_done = TileCounters(c, 1);
  params.dx_done = TileCounters(c, 2);
  params.expert_done = TileCounters(c, 3);
  params.x = static_cast<const uint4*>(c.x);
  params.dy = static_cast<const uint4*>(c.dy);
  params.gate_up = static_cast<const uint4*>(c.gate_up);
  params.dg = static_cast<uint4*>(c.dg);
  params.du = static_cast<uint4*>(c.du);
  params.x_pool = static_cast<uint4*>(c.x_pool);
  params.dy_pool = static_cast<uint4*>(c.dy_pool);
  params.dx_pool = static_cast<const uint4*>(c.dx_pool);
  params.dx = static_cast<uint4*>(c.dx);
  params.dw_partial = c.dw_partial;
  params.dw = c.dw;
  params.unit = c.unit;
  params.biases = c.biases;
  params.dbiases = c.dbiases;
  params.bias_rows = c.bias_rows;
  return params;
}

CudaStatus RunBackward(cudaStream_t stream, const BackwardCall& c) {
  BackwardMaps maps = {};
  const CudaStatus made = FirstFailure({MakeBackwardMaps(c, &maps), MakeWeightMaps(c, &maps)});
  if (!made.ok()) return made;
  BackwardParams params = BackwardParamsOf(c);
  const int64_t num_counters = NumBackwardCounters(c.pool_rows, c.plan.dims.experts_per_rank());
  return RunLaunches(stream, c, {c.x, c.dy, {}}, num_counters, &params,
                     [&](int num_multiprocessors, bool starts_early) {
                       return LaunchBackward(stream, num_multiprocessors, maps, params,
                                             c.float_gradients, starts_early);
                     });
}

}  // namespace megamoe
