// What the plan kernel takes and writes. jax_megamoe/plan.py is the specification: it says what
// each array holds and in which order; this header says how large the arrays are.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "shared/problem.h"

namespace megamoe {

// Limits; jax_megamoe/config.py and plan.py hold the same values.
constexpr int kMaxChoices = 32;
constexpr int kMaxExperts = 512;
constexpr int kMaxSteps = 4;
constexpr int kWaveItems = 66;
constexpr int kGroupTiles = 16;
static_assert(kGroupTiles % 2 == 0, "only the last group of an expert has wide items");

// One GEMM of a kernel as the queue sees it.
struct PlanStep {
  int tiles_m;  // M-tiles of an expert; kTokenTiles: one per kTileRows pool rows of the expert
  int tiles_n;  // N-tiles of an expert
  int lag;      // waves of the first step that the step stays behind what it waits on
};
constexpr int kTokenTiles = 0;

struct PlanProblem {
  RoutingDims dims;
  int64_t pool_routes;  // that the pool has room for, whatever experts of the rank they go to
  int rank;
  int num_steps;
  PlanStep steps[kMaxSteps];
};

// Two tiles of one step, for a pair of blocks: (m, n) for the first block and, for the second, the
// tile below it (tall) or, where the expert has none, the one right of it (wide).
struct alignas(16) Item {
  int32_t kind, expert, m, n;

  MEGAMOE_HOST_DEVICE static constexpr int32_t Kind(int step, bool wide) { return 2 * step + wide; }
  MEGAMOE_HOST_DEVICE constexpr int step() const { return kind / 2; }
  MEGAMOE_HOST_DEVICE constexpr bool wide() const { return kind % 2 != 0; }
};

// Items [first, end), at most kWaveItems, that are claimed together: claim c is the item
// waves[c / kWaveItems].first + c % kWaveItems, and nothing from `end` on.
struct Wave {
  int32_t first, end;
};

// The first of the T tokens of a rank that part `part` of `num_parts` takes.
MEGAMOE_HOST_DEVICE constexpr int PartStart(int T, int part, int num_parts) {
  return static_cast<int>(int64_t{T} * part / num_parts);
}

// The passes of a call whose rows do not fit the pool at once: each takes a part of the tokens of
// every rank, as many of them as always fit.
inline int MaxPasses(const PlanProblem& p) {
  const int64_t tokens = p.pool_routes / (int64_t{p.dims.R} * p.dims.K);
  if (p.dims.T == 0 || tokens == 0) return 1;
  return static_cast<int>((p.dims.T + tokens - 1) / tokens);
}

// Device pointers; every element of every array is written by each call, and again by each pass
// that its routing needs.
struct PlanArrays {
  int32_t* counts;         // [R, E/R], of all passes
  int32_t* expert_start;   // [E/R + 1]
  int32_t* expert_rows;    // [E/R]
  int32_t* slot_row;       // [R, T, K]
  int32_t* row_slot;       // [P]
  Item* items;             // [N, 4]
  Wave* waves;             // [V, 2]
  int32_t* token_order;    // [R*T]
  int32_t* totals;         // [3]: waves, tokens; the passes that the call needs, 1 or MaxPasses
  uint32_t* chunk_counts;  // [chunks, E/R]: scratch between the two kernels
};

// The slots of a source are cut into chunks, one per block; a chunk never spans two sources, nor
// the tokens of two passes, so that counts of either are sums of chunks. One wave of blocks, unless
// a count of a chunk would outgrow the 16 bits it has in chunk_counts.
struct PlanChunks {
  static constexpr int kBlockSlots = 1024;  // slots a block takes at a time
  static constexpr int kWantedChunks = 128;
  static constexpr int64_t kMaxSlots = 32 * kBlockSlots;

  int slots;     // of a chunk, the last one of a part excepted
  int per_part;  // chunks of one part of a source
  int parts;     // of each source: MaxPasses

  MEGAMOE_HOST_DEVICE constexpr int per_source() const { return parts * per_part; }
};

inline PlanChunks ChunksOf(const PlanProblem& p) {
  const RoutingDims& d = p.dims;
  const int parts = MaxPasses(p);
  const int64_t part_slots = (int64_t{d.T} + parts - 1) / parts * d.K;
  const int64_t wanted = part_slots / std::max(1, PlanChunks::kWantedChunks / (d.R * parts));
  int64_t slots = (wanted + PlanChunks::kBlockSlots - 1) / PlanChunks::kBlockSlots;
  slots = slots * PlanChunks::kBlockSlots;
  if (slots < PlanChunks::kBlockSlots) slots = PlanChunks::kBlockSlots;
  if (slots > PlanChunks::kMaxSlots) slots = PlanChunks::kMaxSlots;
  return {static_cast<int>(slots), static_cast<int>((part_slots + slots - 1) / slots), parts};
}

struct PlanField {
  const char* name;
  int64_t elements;
};

// Fields in the order of PlanArrays and of the results of the FFI call, with their int32 elements.
constexpr int kNumPlanFields = 10;
inline std::array<PlanField, kNumPlanFields> PlanFields(const PlanProblem& p) {
  const RoutingDims& d = p.dims;
  const int64_t experts = d.experts_per_rank();
  // A full pool, with as many experts with one row in their last tile as there can be.
  const int64_t tiles =
      p.pool_routes < experts ? p.pool_routes : experts + (p.pool_routes - experts) / kTileRows;
  int64_t items = 0;
  int64_t waves = 0;
  for (int s = 0; s < p.num_steps; ++s) {
    const PlanStep& step = p.steps[s];
    // Every tile one half of an item, or all of a wide item in the last column of an odd tiles_n.
    const bool token_tiles = step.tiles_m == kTokenTiles;
    const int64_t all_tiles = (token_tiles ? tiles : experts * step.tiles_m) * step.tiles_n;
    const int64_t odd_experts =
        token_tiles ? std::min(experts, tiles) : experts * (step.tiles_m % 2);
    const int64_t step_items = (all_tiles + step.tiles_n % 2 * odd_experts) / 2;
    items += step_items;
    waves += (step_items + kWaveItems - 1) / kWaveItems;
  }
  return {{{"counts", d.R * experts},
           {"expert_start", experts + 1},
           {"expert_rows", experts},
           {"slot_row", int64_t{d.R} * d.T * d.K},
           {"row_slot", tiles * kTileRows},
           {"items", items * 4},
           {"waves", waves * 2},
           {"token_order", int64_t{d.R} * d.T},
           {"totals", 3},
           {"chunk_counts", int64_t{d.R} * ChunksOf(p).per_source() * experts}}};
}

// P.
inline int64_t PoolRows(const PlanProblem& p) { return PlanFields(p)[4].elements; }

}  // namespace megamoe
