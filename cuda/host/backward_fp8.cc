#include "host/backward_fp8.h"

#include "host/code_rows.h"
#include "host/tensor_map.h"
#include "kernel/backward_fp8.h"
#include "kernel/quantize_rows.h"
#include "shared/backward_fp8.h"
#include "shared/fp8.h"

namespace megamoe {
namespace {

CudaStatus MakeCodeMaps(const Fp8BackwardCall& c, Fp8BackwardMaps* maps) {
  constexpr int kHalfTile = kTileRows / 2;
  return FirstFailure({
      RowsMap(CodeRows(c.dy_code_pool, c.pool_rows, c.H), kHalfTile, &maps->dy_codes),
      RowsMap(CodeRows(c.dz_codes, c.pool_rows, 2 * c.I), kHalfTile, &maps->dz_codes),
  });
}

CudaStatus MakeWeightMaps(const Fp8BackwardCall& c, Fp8BackwardMaps* maps) {
  const int64_t experts = c.plan.dims.experts_per_rank();
  const auto by_rows = [&](const BackwardMatrix& m, int64_t rows, int columns, CUtensorMap* map) {
    return StackedRowsMap(Codes(m.natural, rows, columns), experts, kFp8Group, map);
  };
  return FirstFailure({
      by_rows(c.gate, c.H, c.I, &maps->gate_by_rows),
      by_rows(c.up, c.H, c.I, &maps->up_by_rows),
      by_rows(c.down, c.I, c.H, &maps->down_by_rows),
  });
}

// Of what g and u are computed again with.
CudaStatus MakeRecomputeMaps(const Fp8BackwardCall& c, Fp8BackwardMaps* maps) {
  const int64_t columns = c.plan.dims.experts_per_rank() * c.I;
  return FirstFailure({
      RowsMap(CodeRows(c.x_code_pool, c.pool_rows, c.H), kTileRows / 2, &maps->x_codes),
      RowsMap(Codes(c.gate.transposed, columns, c.H), kFp8Group, &maps->gate_by_columns),
      RowsMap(Codes(c.up.transposed, columns, c.H), kFp8Group, &maps->up_by_columns),
  });
}

CudaStatus MakeMaps(const Fp8BackwardCall& c, Fp8BackwardMaps* maps) {
  const CudaStatus made =
      FirstFailure({MakeBackwardMaps(c, maps), MakeCodeMaps(c, maps), MakeWeightMaps(c, maps)});
  if (!made.ok() || !MakesGateUp(c)) return made;
  return MakeRecomputeMaps(c, maps);
}

Fp8BackwardParams Fp8ParamsOf(const Fp8BackwardCall& c) {
  Fp8BackwardParams params = {};
  static_cast<BackwardParams&>(params) = BackwardParamsOf(c);
  params.dy_codes = static_cast<const uint4*>(c.dy_codes);
  params.dy_code_pool = static_cast<uint8_t*>(c.dy_code_pool);
  params.dy_rows = ScalesOf(c.dy_code_pool, c.H);
  params.dz_rows = ScalesOf(c.dz_codes, 2 * c.I);
  params.scales = {c.gate.scales, c.up.scales, c.down.scales};
  if (!MakesGateUp(c)) return params;
  params.x_codes = static_cast<const uint4*>(c.x_codes);
  params.x_code_pool = static_cast<uint8_t*>(c.x_code_pool);
  params.x_rows = ScalesOf(c.x_code_pool, c.H);
  return params;
}

}  // namespace

CudaStatus RunFp8Backward(cudaStream_t stream, const Fp8BackwardCall& c) {
  Fp8BackwardMaps maps = {};
  if (CudaStatus status = MakeMaps(c, &maps); !status.ok()) return status;
  Fp8BackwardParams params = Fp8ParamsOf(c);
  const auto of_array = [&](const void* rows, void* codes) -> QuantizeParams {
    return {static_cast<const uint4*>(rows), static_cast<uint8_t*>(codes), c.plan.dims.T, c.H};
  };
  const auto quantize = [&](int num_multiprocessors, bool starts_early) {
    CudaStatus status =
        LaunchQuantizeRows(stream, num_multiprocessors, of_array(c.dy, c.dy_codes), starts_early);
    if (!status.ok() || !MakesGateUp(c)) return status;
    return LaunchQuantizeRows(stream, num_multiprocessors, of_array(c.x, c.x_codes), starts_early);
  };
  const int64_t num_counters = NumBackwardCounters(c.pool_rows, c.plan.dims.experts_per_rank());
  return RunLaunches(stream, c, {c.x, c.dy, quantize}, num_counters, &params,
                     [&](int num_multiprocessors, bool starts_early) {
                       return LaunchFp8Backward(stream, num_multiprocessors, maps, params,
                                                c.float_gradients, starts_early);
                     });
}

}  // namespace megamoe
