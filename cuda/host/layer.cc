#include "host/layer.h"

#include "comm/share_inputs.h"
#include "plan/plan.h"

namespace megamoe {
namespace {

// Claims lie in cache lines of their own.
constexpr int64_t kClaimStride = 32;

CudaStatus NumMultiprocessors(int* count) {
  int device = 0;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  MEGAMOE_RETURN_IF_CUDA_ERROR(
      cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device));
  return {};
}

// Of all ranks.
const int32_t* RoutingOf(const LayerCall& c) {
  return c.plan.dims.R > 1 ? c.peers.expert_idx[c.plan.rank] : c.expert_idx;
}

}  // namespace

int64_t NumCounters(int64_t pool_rows, int for_each_tile, int64_t others) {
  return kNumClaims * kClaimStride + for_each_tile * (pool_rows / kTileRows) + others;
}

uint32_t* TileCounters(const LayerCall& call, int i) {
  return call.counters + NumCounters(call.pool_rows, i, 0);
}

LayerParams ParamsOf(const LayerCall& c) {
  LayerParams params = {};
  params.dims = c.plan.dims;
  params.H = c.H;
  params.I = c.I;
  params.experts_per_block = c.plan.dims.E / c.num_blocks;
  params.wait = c.wait;
  params.plan = c.plan_arrays;
  params.counters = {c.counters, c.counters + kClaimStride, c.counters + 2 * kClaimStride,
                     c.counters + 3 * kClaimStride, TileCounters(c, 0)};
  params.expert_idx = RoutingOf(c);
  params.expert_weight = c.plan.dims.R > 1 ? c.peers.expert_weight[c.plan.rank] : c.expert_weight;
  params.peers = c.peers;
  params.trace = c.trace;
  return params;
}

namespace {

CudaStatus ClearTrace(cudaStream_t stream, const LayerCall& c) {
  if (c.trace.records == nullptr) return {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(c.trace.records, 0, sizeof(TraceRecord), stream));
  if (c.plan.dims.R == 1) return {};
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(c.trace.traffic(), 0, sizeof(PeerTraffic), stream));
  return {};
}

// All ranks' inputs for all ranks. Nothing of it starts early: what is ahead in the stream may be
// anybody's.
CudaStatus Share(cudaStream_t stream, const LayerCall& c, int num_multiprocessors,
                 const LayerInputs& inputs) {
  if (inputs.quantize) {
    if (CudaStatus status = inputs.quantize(num_multiprocessors, false); !status.ok()) {
      return status;
    }
  }
  return LaunchShareInputs(stream, num_multiprocessors,
                           {c.plan.dims, c.H, inputs.x, inputs.dy, c.expert_idx, c.expert_weight,
                            c.wait, c.peers, c.trace});
}

CudaStatus RunPass(cudaStream_t stream, const LayerCall& c, int num_multiprocessors,
                   const LayerInputs& inputs, int64_t num_counters, LayerParams* params,
                   const Launch& launch) {
  const plan::Cleared counters = {c.counters, num_counters};
  const bool has_peers = c.plan.dims.R > 1;
  const WaitContext wait = has_peers ? c.wait : WaitContext{};
  if (CudaStatus status =
          plan::Launch(stream, c.plan, params->pass, RoutingOf(c), c.plan_arrays, counters, wait);
      !status.ok()) {
    return status;
  }
  // Beside the plan, hence behind it.
  if (!has_peers && inputs.quantize) {
    if (CudaStatus status = inputs.quantize(num_multiprocessors, true); !status.ok()) {
      return status;
    }
  }
  for (int64_t i = 0; i < c.num_launches; ++i) {
    params->parts = static_cast<uint32_t>(c.launches[i]);
    // A launch walks the whole item list; the other counters belong to one part each.
    if (i > 0) {
      MEGAMOE_RETURN_IF_CUDA_ERROR(
          cudaMemsetAsync(params->counters.next_item, 0, sizeof(uint32_t), stream));
    }
    if (CudaStatus status = launch(num_multiprocessors, i == 0); !status.ok()) return status;
  }
  return {};
}

}  // namespace

CudaStatus RunLaunches(cudaStream_t stream, const LayerCall& c, const LayerInputs& inputs,
                       int64_t num_counters, LayerParams* params, const Launch& launch) {
  int num_multiprocessors = c.num_multiprocessors;
  if (num_multiprocessors == 0) {
    if (CudaStatus status = NumMultiprocessors(&num_multiprocessors); !status.ok()) return status;
  }
  if (CudaStatus status = ClearTrace(stream, c); !status.ok()) return status;
  if (c.plan.dims.R > 1) {
    if (CudaStatus status = Share(stream, c, num_multiprocessors, inputs); !status.ok()) {
      return status;
    }
  }
  const int max_passes = MaxPasses(c.plan);
  for (params->pass = 0; params->pass < max_passes; ++params->pass) {
    if (CudaStatus status =
            RunPass(stream, c, num_multiprocessors, inputs, num_counters, params, launch);
        !status.ok()) {
      return status;
    }
  }
  return {};
}

}  // namespace megamoe
