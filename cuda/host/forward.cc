#include "host/forward.h"

#include "host/tensor_map.h"
#include "kernel/forward.h"
#include "shared/forward.h"

namespace megamoe {
namespace {

CudaStatus MakeMaps(const ForwardCall& c, ForwardMaps* maps) {
  const int64_t experts = c.plan.dims.experts_per_rank();
  const Matrix pool = {c.pool, c.pool_rows, c.H};
  const Matrix h = {c.h, c.pool_rows, c.I};
  const Matrix gate = {const_cast<void*>(c.w_gate), experts * c.H, c.I};
  const Matrix up = {const_cast<void*>(c.w_up), experts * c.H, c.I};
  const Matrix down = {const_cast<void*>(c.w_down), experts * c.I, c.H};
  return FirstFailure({
      RowsMap(pool, kTileRows / 2, &maps->pool),
      RowsMap(h, kTileRows / 2, &maps->h),
      ChunksMap(gate, 2, &maps->w_gate),
      ChunksMap(up, 2, &maps->w_up),
      ChunksMap(down, 2, &maps->w_down),
  });
}

}  // namespace

int64_t NumForwardCounters(int64_t pool_rows) { return NumCounters(pool_rows, 3, 0); }

CudaStatus RunForward(cudaStream_t stream, const ForwardCall& c) {
  ForwardMaps maps;
  if (CudaStatus status = MakeMaps(c, &maps); !status.ok()) return status;
  ForwardParams params = {};
  static_cast<LayerParams&>(params) = ParamsOf(c);
  params.h_done = TileCounters(c, 1);
  params.o_done = TileCounters(c, 2);
  params.x = static_cast<const uint4*>(c.x);
  params.pool = static_cast<uint4*>(c.pool);
  params.y = static_cast<uint4*>(c.y);
  params.gate_up = static_cast<uint4*>(c.gate_up);
  params.pool_rows = c.pool_rows;
  params.unit = c.unit;
  params.biases = c.biases;
  return RunLaunches(stream, c, {c.x, nullptr, {}}, NumForwardCounters(c.pool_rows), &params,
                     [&](int num_multiprocessors, bool starts_early) {
                       return LaunchForward(stream, num_multiprocessors, maps, params,
                                            starts_early);
                     });
}

}  // namespace megamoe
