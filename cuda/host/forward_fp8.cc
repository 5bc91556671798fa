#include "host/forward_fp8.h"

#include "host/code_rows.h"
#include "host/forward.h"
#include "host/tensor_map.h"
#include "kernel/forward_fp8.h"
#include "kernel/quantize_rows.h"
#include "shared/forward_fp8.h"
#include "shared/fp8.h"

namespace megamoe {
namespace {

CudaStatus MakeMaps(const Fp8ForwardCall& c, Fp8ForwardMaps* maps) {
  const int64_t experts = c.plan.dims.experts_per_rank();
  constexpr int kHalfTile = kTileRows / 2;
  return FirstFailure({
      RowsMap({c.o, c.pool_rows, c.H}, kHalfTile, &maps->pool),
      RowsMap(CodeRows(c.x_pool, c.pool_rows, c.H), kHalfTile, &maps->x),
      RowsMap(CodeRows(c.h, c.pool_rows, c.I), kHalfTile, &maps->h),
      RowsMap(Codes(c.w_gate.codes, experts * c.I, c.H), kFp8Group, &maps->w_gate),
      RowsMap(Codes(c.w_up.codes, experts * c.I, c.H), kFp8Group, &maps->w_up),
      StackedRowsMap(Codes(c.w_down.codes, c.H, c.I), experts, kFp8Group, &maps->w_down),
  });
}

}  // namespace

CudaStatus RunFp8Forward(cudaStream_t stream, const Fp8ForwardCall& c) {
  Fp8ForwardMaps maps;
  if (CudaStatus status = MakeMaps(c, &maps); !status.ok()) return status;
  Fp8ForwardParams params = {};
  static_cast<LayerParams&>(params) = ParamsOf(c);
  params.h_done = TileCounters(c, 1);
  params.o_done = TileCounters(c, 2);
  params.pool = static_cast<uint4*>(c.o);
  params.y = static_cast<uint4*>(c.y);
  params.gate_up = static_cast<uint4*>(c.gate_up);
  params.pool_rows = c.pool_rows;
  params.unit = c.unit;
  params.x_codes = static_cast<const uint4*>(c.x_codes);
  params.x_pool = static_cast<uint8_t*>(c.x_pool);
  params.x_rows = ScalesOf(c.x_pool, c.H);
  params.h_rows = ScalesOf(c.h, c.I);
  params.scales = {c.w_gate.scales, c.w_up.scales, c.w_down.scales};
  const QuantizeParams x = {static_cast<const uint4*>(c.x), static_cast<uint8_t*>(c.x_codes),
                            c.plan.dims.T, c.H};
  const auto quantize = [&](int num_multiprocessors, bool starts_early) {
    return LaunchQuantizeRows(stream, num_multiprocessors, x, starts_early);
  };
  return RunLaunches(stream, c, {nullptr, nullptr, quantize}, NumForwardCounters(c.pool_rows),
                     &params, [&](int num_multiprocessors, bool starts_early) {
                       return LaunchFp8Forward(stream, num_multiprocessors, maps, params,
                                               starts_early);
                     });
}

}  // namespace megamoe
