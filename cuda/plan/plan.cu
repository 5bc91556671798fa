// The plan of one rank: counts -> first rows -> slots and items. jax_megamoe/plan.py specifies it.
//
// Two kernels, so that the second sees the counts of every chunk:
//   CountRoutes  each block counts the routes of its chunk of slots per local expert.
//   PlaceRoutes  each block adds up the counts of all chunks and of those before its own, places
//                the routes of its chunk with a stable in-block sort, and writes a share of the
//                lists (items, waves, pads, tails). Of a call that may have several passes each has
//                a launch, the first of which finds how many there are.
// Atomics only add integers in shared memory, whose order cannot show.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/wait.cuh"
#include "plan/layout.cuh"
#include "plan/plan.h"
#include "plan/work.cuh"
#include "ptx/sync.cuh"
#include "shared/launch.h"

namespace megamoe::plan {
namespace {

struct Route {
  int expert;       // local expert, -1 for no local route
  bool last_local;  // the last pool row of its token
};

// Any id outside [0, E), however far, lands outside [0, E/R) in unsigned arithmetic.
__device__ int LocalExpert(const PlanProblem& p, int32_t id) {
  const unsigned experts = p.dims.experts_per_rank();
  const unsigned local = static_cast<unsigned>(id) - p.rank * experts;
  return local < experts ? static_cast<int>(local) : -1;
}

__device__ Route ReadRoute(const PlanProblem& p, const int32_t* expert_idx, int slot) {
  const int k = slot % p.dims.K;
  const int32_t* token = expert_idx + (slot - k);
  const int expert = LocalExpert(p, __ldg(token + k));
  // The last row of a token is that of its highest expert, of the highest choice among equals. No
  // branches: the loads of the token's ids stay independent.
  bool last = expert >= 0;
#pragma unroll 8
  for (int j = 0; j < p.dims.K; ++j) {
    const int other = LocalExpert(p, __ldg(token + j));
    last &= other < expert + (j <= k);
  }
  return {expert, last};
}

// Whether expert_idx may not be what it will be. Looked at beside the routes, not before.
__device__ bool LacksRoutes(const WaitContext& wait) {
  return wait.failed_epoch != nullptr && HasFailed(wait);
}

// The slots [first, end) of a chunk; none where a part has fewer than others.
struct Range {
  int first, end;
};
__device__ Range ChunkSlots(const RoutingDims& d, const PlanChunks& chunks, int chunk) {
  const int of_sources = chunk / chunks.per_part;
  const int source = of_sources / chunks.parts;
  const int part = of_sources - source * chunks.parts;
  const int slots = source * d.T * d.K;
  const int first = slots + PartStart(d.T, part, chunks.parts) * d.K;
  const int end = slots + PartStart(d.T, part + 1, chunks.parts) * d.K;
  const int before = (chunk - of_sources * chunks.per_part) * chunks.slots;
  return {first + before, min(first + before + chunks.slots, end)};
}

__global__ __launch_bounds__(kThreads, 1) void CountRoutes(PlanProblem p, PlanChunks chunks,
                                                           const int32_t* expert_idx,
                                                           uint32_t* chunk_counts,
                                                           WaitContext wait) {
  ptx::LetNextKernelStart();
  __shared__ uint32_t counts[kMaxExperts];
  const int experts = p.dims.experts_per_rank();
  if (threadIdx.x < experts) counts[threadIdx.x] = 0;
  const bool lacks_routes = LacksRoutes(wait);
  __syncthreads();
  const Range slots = ChunkSlots(p.dims, chunks, blockIdx.x);
  for (int slot = slots.first + threadIdx.x; slot < slots.end; slot += kThreads) {
    const Route route = ReadRoute(p, expert_idx, slot);
    if (route.expert >= 0 && !lacks_routes) {
      atomicAdd(&counts[route.expert], 1u | static_cast<uint32_t>(route.last_local) << kTokenShift);
    }
  }
  __syncthreads();
  if (threadIdx.x < experts) chunk_counts[blockIdx.x * experts + threadIdx.x] = counts[threadIdx.x];
}

// Replaces the counts of the warps, [kWarps][experts], by those of the warps before; returns the
// sum of a column to the thread of its expert. Counts of one round are at most kThreads: 16 bits.
__device__ uint32_t ScanWarpCounts(uint32_t* warp_counts, int experts) {
  if (threadIdx.x >= experts) return 0;
  constexpr int kBatch = 8;  // loads in flight
  uint32_t* column = warp_counts + threadIdx.x;
  uint32_t sum = 0;
  for (int warp = 0; warp < kWarps; warp += kBatch) {
    uint32_t counts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) counts[i] = column[(warp + i) * experts];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      column[(warp + i) * experts] = sum;
      sum += counts[i];
    }
  }
  return sum;
}

// Places the routes of a chunk in slot order: a stable counting sort, kThreads slots a round.
__device__ void PlaceChunk(const PlanProblem& p, Range slots, const int32_t* expert_idx,
                           bool lacks_routes, const PlanArrays& out, Layout& layout,
                           uint32_t* warp_counts) {
  const int experts = p.dims.experts_per_rank();
  const int warp = threadIdx.x / 32;
  const unsigned lanes_before = (1u << threadIdx.x % 32) - 1;
  for (int round = slots.first; round < slots.end; round += kThreads) {
    for (int i = threadIdx.x; i < kWarps * experts; i += kThreads) warp_counts[i] = 0;
    __syncthreads();
    const int slot = round + threadIdx.x;
    Route route = {-1, false};
    if (slot < slots.end) route = ReadRoute(p, expert_idx, slot);
    if (lacks_routes) route = {-1, false};
    const unsigned same = __match_any_sync(kAllLanes, route.expert);
    const unsigned same_last = same & __ballot_sync(kAllLanes, route.last_local);
    uint32_t* warp_count = warp_counts + warp * experts + route.expert;
    if (route.expert >= 0 && (same & lanes_before) == 0) {
      *warp_count = __popc(same) | __popc(same_last) << kTokenShift;
    }
    __syncthreads();
    const Count round_count = Unpack(ScanWarpCounts(warp_counts, experts));
    __syncthreads();
    if (route.expert >= 0) {
      const Count before = Unpack(*warp_count);
      const Count next = layout.next[route.expert];
      const int row = next.rows + before.rows + __popc(same & lanes_before);
      out.slot_row[slot] = row;
      out.row_slot[row] = slot;
      if (route.last_local) {
        const int place = next.tokens + before.tokens + __popc(same_last & lanes_before);
        out.token_order[place] = slot / p.dims.K;
      }
    } else if (slot < slots.end) {
      out.slot_row[slot] = -1;
    }
    __syncthreads();
    if (threadIdx.x < experts) {
      layout.next[threadIdx.x].rows += round_count.rows;
      layout.next[threadIdx.x].tokens += round_count.tokens;
    }
  }
}

// Writes `value` to array[first, end), with the whole grid.
template <typename T>
__device__ void Fill(T* array, int64_t first, int64_t end, T value) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = first + blockIdx.x * kThreads + threadIdx.x; i < end; i += step) {
    array[i] = value;
  }
}
__device__ void FillTail(int32_t* array, int64_t first, int64_t end) {
  Fill(array, first, end, -1);
}

// The passes that the call needs, and which one this is.
struct Pass {
  int index, count;
};

// Slots of tokens that the pass does not take.
__device__ void FillOtherParts(const RoutingDims& d, const Pass& pass, int32_t* slot_row) {
  const int64_t per_source = int64_t{d.T} * d.K;
  for (int r = 0; r < d.R; ++r) {
    int32_t* of_source = slot_row + r * per_source;
    FillTail(of_source, 0, int64_t{PartStart(d.T, pass.index, pass.count)} * d.K);
    FillTail(of_source, int64_t{PartStart(d.T, pass.index + 1, pass.count)} * d.K, per_source);
  }
}

struct Ends {
  int64_t row_slot, items, waves, token_order;  // int32 elements of the arrays with a tail
};

__device__ void WriteLists(const PlanProblem& p, const PlanChunks& chunks, const Pass& pass,
                           const Ends& ends, const PlanArrays& out, Layout& layout) {
  const int experts = p.dims.experts_per_rank();
  const StepStart num = StartOf(p, layout, p.num_steps);
  ListItems(p, layout, out.items);
  ListWaves(p, layout, out.waves);
  FillTail(reinterpret_cast<int32_t*>(out.items), int64_t{num.items} * 4, ends.items);
  FillTail(reinterpret_cast<int32_t*>(out.waves), int64_t{num.waves} * 2, ends.waves);
  FillTail(out.row_slot, int64_t{layout.tile_start[experts]} * kTileRows, ends.row_slot);
  FillTail(out.token_order, layout.token_start[experts], ends.token_order);

  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  for (int e = warp; e < experts; e += gridDim.x * kWarps) {
    const int end = layout.tile_start[e + 1] * kTileRows;
    const int first_pad = layout.tile_start[e] * kTileRows + layout.total[e].rows;
    for (int row = first_pad + threadIdx.x % 32; row < end; row += 32) out.row_slot[row] = -1;
  }
  if (blockIdx.x == 0) {
    for (int e = threadIdx.x; e <= experts; e += kThreads) {
      out.expert_start[e] = layout.tile_start[e] * kTileRows;
      if (e < experts) out.expert_rows[e] = layout.total[e].rows;
    }
    if (threadIdx.x == 0) {
      out.totals[0] = num.waves;
      out.totals[1] = layout.token_start[experts];
      out.totals[2] = pass.count;
    }
  }
  if (pass.index == 0 && blockIdx.x < p.dims.R) {  // one source each; layout.next is free now
    __syncthreads();
    if (threadIdx.x < experts) layout.next[threadIdx.x] = {0, 0};
    __syncthreads();
    const AllChunks all = {p.dims.R * chunks.per_source()};
    const int first = blockIdx.x * chunks.per_source();
    AddChunks(out.chunk_counts, experts, all, first, first + chunks.per_source(), layout.next);
    __syncthreads();
    if (threadIdx.x < experts) {
      out.counts[blockIdx.x * experts + threadIdx.x] = layout.next[threadIdx.x].rows;
    }
  }
}

// What PlaceRoutes has in shared memory; the launch gives it the counts that E/R experts need.
struct PlaceMemory {
  Layout layout;
  uint32_t warp_counts[kWarps * kMaxExperts];  // [kWarps][E/R]
};
constexpr int PlaceMemoryBytes(int experts) {
  return offsetof(PlaceMemory, warp_counts) + kWarps * experts * sizeof(uint32_t);
}

// The chunks that a pass takes, of a call that may have several; all: it takes those of all tokens.
__device__ ChunksOfPart ChunksOfPass(const RoutingDims& d, const PlanChunks& chunks, int pass,
                                     bool all) {
  const int count = d.R * (all ? chunks.per_source() : chunks.per_part);
  if (all) return {count, 0, count, 0};
  return {count, pass * chunks.per_part, chunks.per_part, chunks.per_source()};
}

// kSeveralPasses: there may be more passes than this one.
template <bool kSeveralPasses>
__global__ __launch_bounds__(kThreads, 1) void PlaceRoutes(const __grid_constant__ PlanProblem p,
                                                           PlanChunks chunks, int pass_idx,
                                                           Ends ends, const int32_t* expert_idx,
                                                           PlanArrays out, Cleared cleared,
                                                           WaitContext wait) {
  ptx::LetNextKernelStart();
  ptx::WaitForPreviousKernel();
  const bool lacks_routes = LacksRoutes(wait);
  const int experts = p.dims.experts_per_rank();
  std::conditional_t<kSeveralPasses, ChunksOfPart, AllChunks> of_pass = {};
  Pass pass = {pass_idx, 1};
  if constexpr (kSeveralPasses) {
    // Written by an earlier kernel, and by this one only where no block looks at it.
    if (pass_idx > 0 && (lacks_routes || pass_idx >= out.totals[2])) {
      if (lacks_routes && blockIdx.x == 0 && threadIdx.x == 0) out.totals[2] = 0;
      return;
    }
    of_pass = ChunksOfPass(p.dims, chunks, pass_idx, pass_idx == 0);
  } else {
    of_pass = {p.dims.R * chunks.per_source()};
  }
  Fill(cleared.words, 0, cleared.count, 0u);
  auto& [layout, warp_counts] = *static_cast<PlaceMemory*>(ptx::DynamicSharedMemory());
  MakeLayout(out.chunk_counts, experts, of_pass, blockIdx.x, layout);
  if constexpr (kSeveralPasses) {
    const bool fits = layout.tile_start[experts] * int64_t{kTileRows} <= ends.row_slot;
    if (pass_idx > 0 || !fits) pass.count = chunks.parts;
    if (!fits) {  // all tokens; a part of them does
      of_pass = ChunksOfPass(p.dims, chunks, pass_idx, false);
      MakeLayout(out.chunk_counts, experts, of_pass, blockIdx.x, layout);
    }
    if (pass.count > 1) FillOtherParts(p.dims, pass, out.slot_row);
  }
  if (blockIdx.x < of_pass.count) {
    PlaceChunk(p, ChunkSlots(p.dims, chunks, of_pass.At(blockIdx.x)), expert_idx, lacks_routes, out,
               layout, warp_counts);
  }
  WriteLists(p, chunks, pass, ends, out, layout);
}

cudaLaunchConfig_t LaunchConfig(cudaStream_t stream, int blocks, int shared_bytes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return config;
}

}  // namespace

CudaStatus Load() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, CountRoutes));
  for (const auto place : {PlaceRoutes<false>, PlaceRoutes<true>}) {
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(
        place, cudaFuncAttributeMaxDynamicSharedMemorySize, PlaceMemoryBytes(kMaxExperts)));
  }
  return {};
}

CudaStatus Launch(cudaStream_t stream, const PlanProblem& problem, int pass,
                  const int32_t* expert_idx, const PlanArrays& arrays, const Cleared& cleared,
                  const WaitContext& wait) {
  const PlanChunks chunks = ChunksOf(problem);
  const int num_chunks = problem.dims.R * chunks.per_source();
  if (num_chunks > 0 && pass == 0) {
    const cudaLaunchConfig_t config = LaunchConfig(stream, num_chunks, 0);
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, CountRoutes, problem, chunks,
                                                    expert_idx, arrays.chunk_counts, wait));
  }
  const auto fields = PlanFields(problem);
  const Ends ends = {fields[4].elements, fields[5].elements, fields[6].elements,
                     fields[7].elements};
  // One more than chunks: see ListWaves.
  const int blocks = std::max(num_chunks, PlanChunks::kWantedChunks) + 1;
  cudaLaunchConfig_t config =
      LaunchConfig(stream, blocks, PlaceMemoryBytes(problem.dims.experts_per_rank()));
  cudaLaunchAttribute early = EarlyStart();
  if (num_chunks > 0) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  const auto place = chunks.parts > 1 ? PlaceRoutes<true> : PlaceRoutes<false>;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, place, problem, chunks, pass, ends,
                                                  expert_idx, arrays, cleared, wait));
  return {};
}

}  // namespace megamoe::plan
