// Where the rows, tokens and tiles of every expert begin, as a block of PlaceRoutes works it out
// from the counts of all chunks.
//
// reads: chunk_counts [chunks, E/R], which CountRoutes has written. threads: the whole block.
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"
#include "shared/plan.h"

namespace megamoe::plan {

constexpr int kThreads = PlanChunks::kBlockSlots;
constexpr int kWarps = kThreads / 32;

static_assert(kMaxExperts <= kThreads / 2, "a thread per expert, and two groups to add chunks");
static_assert(PlanChunks::kMaxSlots < 1 << 16, "counts of a chunk have 16 bits");

// Rows and tokens of an expert. A token counts where its last local row lies, so that ordering
// those rows orders the tokens by the moment their sum is complete.
struct Count {
  int rows;
  int tokens;
};

// Chunk counts hold both in one word.
constexpr int kTokenShift = 16;
__device__ inline Count Unpack(uint32_t packed) {
  return {static_cast<int>(packed & 0xffff), static_cast<int>(packed >> kTokenShift)};
}

// What a block knows of all experts before it places anything.
struct Layout {
  Count total[kMaxExperts];          // of all chunks
  Count next[kMaxExperts];           // where the block's next row and token of the expert go
  int tile_start[kMaxExperts + 1];   // M-tiles of the experts before
  int odd_start[kMaxExperts + 1];    // experts before with an odd number of M-tiles
  int token_start[kMaxExperts + 1];  // tokens of the experts before
};

// The chunks of a plan, in the order of their slots: all of them, or those of a part of the tokens
// of each source. `At` says which one of all a chunk is.
struct AllChunks {
  int count;

  __device__ int At(int chunk) const { return chunk; }
};
struct ChunksOfPart {
  int count, first, per_part, per_source;

  __device__ int At(int chunk) const {
    const int source = chunk / per_part;
    return first + source * per_source + chunk - source * per_part;
  }
};

// Adds the counts of the chunks [first, end) to sums[experts], with the whole block.
template <typename Chunks>
__device__ inline void AddChunks(const uint32_t* chunk_counts, int experts, const Chunks& chunks,
                                 int first, int end, Count* sums) {
  const int expert = threadIdx.x % experts;
  const int groups = kThreads / experts;
  const int group = threadIdx.x / experts;
  if (group >= groups) return;
  constexpr int kBatch = 8;  // loads in flight: latency is all that this costs
  Count sum = {0, 0};
  for (int chunk = first + group; chunk < end; chunk += kBatch * groups) {
    uint32_t packed[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int at = chunk + i * groups;
      packed[i] = at < end ? __ldcg(chunk_counts + chunks.At(at) * experts + expert) : 0;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      sum.rows += Unpack(packed[i]).rows;
      sum.tokens += Unpack(packed[i]).tokens;
    }
  }
  if (sum.rows > 0) atomicAdd(&sums[expert].rows, sum.rows);
  if (sum.tokens > 0) atomicAdd(&sums[expert].tokens, sum.tokens);
}

// starts[e] = value(0) + ... + value(e - 1), for e in [0, experts], with one warp.
template <typename Value>
__device__ void ScanWithWarp(int experts, Value value, int* starts) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int base = 0; base < experts; base += 32) {
    const int expert = base + lane;
    const int own = expert < experts ? value(expert) : 0;
    int sum = own;
    for (int distance = 1; distance < 32; distance *= 2) {
      const int other = __shfl_up_sync(kAllLanes, sum, distance);
      if (lane >= distance) sum += other;
    }
    if (expert < experts) starts[expert] = before + sum - own;
    before += __shfl_sync(kAllLanes, sum, 31);
  }
  if (lane == 0) starts[experts] = before;
}

__device__ inline int TilesOf(int rows) { return (rows + kTileRows - 1) / kTileRows; }

// Fills `layout` for the block that places `chunk`; leaves the block synchronised.
template <typename Chunks>
__device__ inline void MakeLayout(const uint32_t* chunk_counts, int experts, const Chunks& chunks,
                                  int chunk, Layout& layout) {
  if (threadIdx.x < experts) layout.total[threadIdx.x] = layout.next[threadIdx.x] = {0, 0};
  __syncthreads();
  const int own = min(chunk, chunks.count);
  AddChunks(chunk_counts, experts, chunks, 0, own, layout.next);
  AddChunks(chunk_counts, experts, chunks, own, chunks.count, layout.total);
  __syncthreads();
  if (threadIdx.x < experts) {
    layout.total[threadIdx.x].rows += layout.next[threadIdx.x].rows;
    layout.total[threadIdx.x].tokens += layout.next[threadIdx.x].tokens;
  }
  __syncthreads();
  const int warp = threadIdx.x / 32;
  const auto tiles = [&](int e) { return TilesOf(layout.total[e].rows); };
  if (warp == 0) {
    ScanWithWarp(experts, tiles, layout.tile_start);
  } else if (warp == 1) {
    ScanWithWarp(experts, [&](int e) { return layout.total[e].tokens; }, layout.token_start);
  } else if (warp == 2) {
    ScanWithWarp(experts, [&](int e) { return tiles(e) % 2; }, layout.odd_start);
  }
  __syncthreads();
  if (threadIdx.x < experts) {
    layout.next[threadIdx.x].rows += layout.tile_start[threadIdx.x] * kTileRows;
    layout.next[threadIdx.x].tokens += layout.token_start[threadIdx.x];
  }
  __syncthreads();
}

}  // namespace megamoe::plan
