// What one call of either pass consists of on the host, and how its launches follow each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "shared/activation.h"
#include "shared/cuda_status.h"
#include "shared/layer.h"

namespace megamoe {

// Device pointers and sizes of a call; shapes as in the dimension key, P = pool_rows.
struct LayerCall {
  PlanProblem plan;
  PlanArrays plan_arrays;
  int H;
  int I;
  int num_blocks;  // B of the summation tree
  int64_t pool_rows;
  int num_multiprocessors;     // that its kernels count on; 0: all of the device
  const int32_t* expert_idx;   // [T, K]
  const float* expert_weight;  // [T, K]
  GatedUnit unit;
  ExpertBiases biases;      // null: none
  PeerArrays peers;         // with more than one rank
  bool bf16_sums;           // of PeerLayout, with more than one rank
  bool has_codes;           // likewise
  uint32_t* counters;       // see TileCounters
  const int64_t* launches;  // the parts (shared/part.h) of each
  int64_t num_launches;
  WaitContext wait;   // of all launches
  TraceBuffer trace;  // of all launches
};

// The counters of a call are those of the claims, then some for each tile, then others: how many
// words they are, and where the i-th of each tile begin.
int64_t NumCounters(int64_t pool_rows, int for_each_tile, int64_t others);
uint32_t* TileCounters(const LayerCall& call, int i);

// What the kernel of a call takes, but for the parts of a launch. x_ready is TileCounters 0.
LayerParams ParamsOf(const LayerCall& call);

using Launch = std::function<CudaStatus(int num_multiprocessors, bool starts_early)>;

// What a call makes of its tokens before its kernel reads them.
struct LayerInputs {
  // With more than one rank these are shared; null: not.
  const void* x;
  const void* dy;
  // Makes codes, which the ranks share, too; on one rank it runs beside the plan. Empty: none.
  Launch quantize;
};

// Enqueues what the inputs need and, for each pass that the call may need, the plan, which clears
// the counters, and then each of the launches, for which it sets params->pass and parts. Allocates
// nothing and does not wait.
CudaStatus RunLaunches(cudaStream_t stream, const LayerCall& call, const LayerInputs& inputs,
                       int64_t num_counters, LayerParams* params, const Launch& launch);

}  // namespace megamoe
