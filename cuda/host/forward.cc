#include "host/forward.h"

#include "host/tensor_map.h"
#include "kernel/forward.h"
#include "plan/plan.h"
#include "shared/forward.h"

namespace megamoe {
namespace {

// Claims lie in cache lines of their own.
constexpr int64_t kClaimStride = 32;

ForwardCounters CountersAt(uint32_t* base, int64_t pool_rows) {
  const int64_t tiles = pool_rows / kTileRows;
  uint32_t* of_tiles = base + kNumClaims * kClaimStride;
  return {base,     base + kClaimStride, base + 2 * kClaimStride,
          of_tiles, of_tiles + tiles,    of_tiles + 2 * tiles};
}

CudaStatus MakeMaps(const ForwardCall& c, ForwardMaps* maps) {
  const int64_t experts = c.plan.dims.experts_per_rank();
  const Matrix pool = {c.pool, c.pool_rows, c.H};
  const Matrix h = {c.h, c.pool_rows, c.I};
  const Matrix gate = {const_cast<void*>(c.w_gate), experts * c.H, c.I};
  const Matrix up = {const_cast<void*>(c.w_up), experts * c.H, c.I};
  const Matrix down = {const_cast<void*>(c.w_down), experts * c.I, c.H};
  const CudaStatus made[] = {
      RowsMap(pool, kTileRows / 2, &maps->pool), RowsMap(h, kTileRows / 2, &maps->h),
      ChunksMap(gate, 2, &maps->w_gate),         ChunksMap(up, 2, &maps->w_up),
      ChunksMap(down, 2, &maps->w_down),
  };
  for (const CudaStatus& status : made) {
    if (!status.ok()) return status;
  }
  return {};
}

CudaStatus NumMultiprocessors(int* count) {
  int device = 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
  return {};
}

}  // namespace

int64_t NumForwardCounters(int64_t pool_rows) {
  return kNumClaims * kClaimStride + 3 * (pool_rows / kTileRows);
}

CudaStatus RunForward(cudaStream_t stream, const ForwardCall& c, const int64_t* launches,
                      int64_t num_launches) {
  ForwardMaps maps;
  if (CudaStatus status = MakeMaps(c, &maps); !status.ok()) return status;
  int num_multiprocessors = 0;
  if (CudaStatus status = NumMultiprocessors(&num_multiprocessors); !status.ok()) return status;

  const plan::Cleared counters = {c.counters, NumForwardCounters(c.pool_rows)};
  if (CudaStatus status = plan::Launch(stream, c.plan, c.expert_idx, c.plan_arrays, counters);
      !status.ok()) {
    return status;
  }
  if (c.trace.records != nullptr) {
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(c.trace.records, 0, sizeof(TraceRecord), stream));
  }
  ForwardParams params = {};
  params.dims = c.plan.dims;
  params.H = c.H;
  params.I = c.I;
  params.experts_per_block = c.plan.dims.E / c.num_blocks;
  params.plan = c.plan_arrays;
  params.counters = CountersAt(c.counters, c.pool_rows);
  params.expert_idx = c.expert_idx;
  params.expert_weight = c.expert_weight;
  params.x = static_cast<const uint4*>(c.x);
  params.pool = static_cast<uint4*>(c.pool);
  params.y = static_cast<uint4*>(c.y);
  params.wait = c.wait;
  params.trace = c.trace;
  for (int64_t i = 0; i < num_launches; ++i) {
    params.parts = static_cast<uint32_t>(launches[i]);
    // A launch walks the whole item list; the other counters belong to one part each.
    if (i > 0) {
      MEGAMOE_RETURN_IF_CUDA_ERROR(
          cudaMemsetAsync(params.counters.next_item, 0, sizeof(uint32_t), stream));
    }
    if (CudaStatus status = LaunchForward(stream, num_multiprocessors, maps, params, i == 0);
        !status.ok()) {
      return status;
    }
  }
  return {};
}

}  // namespace megamoe
