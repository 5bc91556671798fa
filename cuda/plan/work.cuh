// The work of a plan, written from the layout that every block has: the items of the steps, and the
// waves of items in claim order.
//
// threads: ListItems and ListWaves take the whole grid; neither waits for another thread.
#pragma once

#include <cstdint>

#include "plan/layout.cuh"
#include "shared/plan.h"

namespace megamoe::plan {

// Items of the first `tiles_m` tiles of an expert, an even number of them.
__device__ inline int TallItems(const PlanStep& step, int tiles_m) {
  return tiles_m / 2 * step.tiles_n;
}

// Items of a step of the experts before `expert`.
__device__ inline int ItemsBefore(const PlanStep& step, const Layout& layout, int expert) {
  int tall_rows = expert * (step.tiles_m / 2);
  int wide_rows = expert * (step.tiles_m % 2);
  if (step.tiles_m == kTokenTiles) {
    wide_rows = layout.odd_start[expert];
    tall_rows = (layout.tile_start[expert] - wide_rows) / 2;
  }
  return tall_rows * step.tiles_n + wide_rows * ((step.tiles_n + 1) / 2);
}

__device__ inline int WavesOf(int items) { return (items + kWaveItems - 1) / kWaveItems; }

// Where the items and waves of a step begin, when the steps follow each other; for num_steps, how
// many there are.
struct StepStart {
  int items, waves;
};
__device__ inline StepStart StartOf(const PlanProblem& p, const Layout& layout, int step) {
  StepStart start = {0, 0};
  for (int s = 0; s < step; ++s) {
    const int items = ItemsBefore(p.steps[s], layout, p.dims.experts_per_rank());
    start.items += items;
    start.waves += WavesOf(items);
  }
  return start;
}

// A warp writes the items of one (expert, step, pair of columns), group by group.
__device__ inline void ListItems(const PlanProblem& p, const Layout& layout, Item* items) {
  int pairs = 0;
  for (int s = 0; s < p.num_steps; ++s) pairs += (p.steps[s].tiles_n + 1) / 2;
  const int all_pairs = pairs * p.dims.experts_per_rank();
  const int warp = (blockIdx.x * kThreads + threadIdx.x) / 32;
  for (int index = warp; index < all_pairs; index += gridDim.x * kWarps) {
    const int expert = index / pairs;
    int pair = index - expert * pairs;
    int s = 0;
    for (; pair >= (p.steps[s].tiles_n + 1) / 2; ++s) pair -= (p.steps[s].tiles_n + 1) / 2;
    const PlanStep& step = p.steps[s];
    const bool token_tiles = step.tiles_m == kTokenTiles;
    const int first_m = token_tiles ? layout.tile_start[expert] : 0;
    const int tiles_m = token_tiles ? layout.tile_start[expert + 1] - first_m : step.tiles_m;
    const int group_tiles = token_tiles ? kGroupTiles : tiles_m;
    const int n = pair * 2;
    const int columns = min(2, step.tiles_n - n);
    Item* of_expert = items + StartOf(p, layout, s).items + ItemsBefore(step, layout, expert);
    for (int group = 0; group < tiles_m; group += group_tiles) {
      const int half = min(group_tiles, tiles_m - group) / 2;
      const int odd = min(group_tiles, tiles_m - group) % 2;
      const int tall = columns * half;
      Item* out = of_expert + TallItems(step, group) + pair * (2 * half + odd);
      for (int i = threadIdx.x % 32; i < tall + odd; i += 32) {
        const bool wide = i == tall;
        const int column = i >= half && !wide;
        const int m = group + 2 * (wide ? half : i - column * half);
        out[i] = {Item::Kind(s, wide), expert, first_m + m, n + column};
      }
    }
  }
}

// The first items of the first step that a wave waits for, of which the last item is item `last` of
// `step` and belongs to `expert`: up to the end of its group or, with fixed tiles_m, of the expert.
__device__ inline int NeededItems(const PlanProblem& p, const Layout& layout, const PlanStep& step,
                                  int expert, int last) {
  const int of_expert = ItemsBefore(p.steps[0], layout, expert + 1);
  if (step.tiles_m != kTokenTiles) return of_expert;
  const int group = (last - ItemsBefore(step, layout, expert)) / TallItems(step, kGroupTiles);
  return min(of_expert, ItemsBefore(p.steps[0], layout, expert) +
                            TallItems(p.steps[0], (group + 1) * kGroupTiles));
}

// The key of a wave of a step behind the first that waits for `needed` items. The key of a wave of
// the first step is its index.
__device__ inline int WaveKey(const PlanStep& step, int needed) {
  return max(needed - 1, 0) / kWaveItems + step.lag;
}

// The first of `experts` for which `reached` holds, which then holds for all behind it.
template <typename Reached>
__device__ int FirstExpert(int experts, Reached reached) {
  int first = 0;
  int end = experts;
  while (first < end) {
    const int middle = (first + end) / 2;
    if (reached(middle)) {
      end = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

// Waves of a step with a key below `bound`: those of which the last item has one. Keys grow with
// the expert, and in it with the group.
__device__ inline int WavesBelow(const PlanProblem& p, const Layout& layout, int s, int bound) {
  const int experts = p.dims.experts_per_rank();
  const PlanStep& first = p.steps[0];
  const PlanStep& step = p.steps[s];
  const int waves = WavesOf(ItemsBefore(step, layout, experts));
  if (s == 0) return max(0, min(bound, waves));
  const int expert = FirstExpert(
      experts, [&](int e) { return WaveKey(step, ItemsBefore(first, layout, e + 1)) >= bound; });
  if (expert == experts) return waves;
  int below = ItemsBefore(step, layout, expert);
  if (step.tiles_m == kTokenTiles) {
    // A group has such a key if it needs no more items than this of its own expert.
    const int needed = (bound - step.lag) * kWaveItems - ItemsBefore(first, layout, expert);
    const int groups = max(needed, 0) / TallItems(first, kGroupTiles);
    below += TallItems(step, groups * kGroupTiles);
  }
  return below / kWaveItems;
}

// A thread writes a wave, to its place among all waves. From the last block on, which has no chunk
// to place: up to kThreads waves cost no time.
__device__ inline void ListWaves(const PlanProblem& p, const Layout& layout, Wave* waves) {
  const int experts = p.dims.experts_per_rank();
  const int num_waves = StartOf(p, layout, p.num_steps).waves;
  const int thread = (gridDim.x - 1 - blockIdx.x) * kThreads + threadIdx.x;
  for (int index = thread; index < num_waves; index += gridDim.x * kThreads) {
    int step = 0;
    while (StartOf(p, layout, step + 1).waves <= index) ++step;
    const StepStart start = StartOf(p, layout, step);
    const int wave = index - start.waves;
    const int first = wave * kWaveItems;
    const int end = min(first + kWaveItems, ItemsBefore(p.steps[step], layout, experts));
    int key = wave;
    if (step > 0) {
      const int expert = FirstExpert(
          experts, [&](int e) { return ItemsBefore(p.steps[step], layout, e + 1) >= end; });
      key = WaveKey(p.steps[step], NeededItems(p, layout, p.steps[step], expert, end - 1));
    }
    // Waves are ordered by key, by step among equal keys.
    int place = wave;
    for (int s = 0; s < p.num_steps; ++s) {
      if (s != step) place += WavesBelow(p, layout, s, key + (s < step));
    }
    waves[place] = {start.items + first, start.items + end};
  }
}

}  // namespace megamoe::plan
