// The work of a plan, written from the layout that every block has: the items of the steps, and the
// waves of items in claim order.
//
// threads: ListItems and ListWaves take the whole grid; neither waits for another thread.
#pragma once

#include <cstdint>

#include "plan/layout.cuh"
#include "shared/plan.h"

namespace megamoe::plan {

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

// A warp writes the items of one (expert, step, pair of columns).
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
    const int half = tiles_m / 2;
    const int odd = tiles_m % 2;
    const int n = pair * 2;
    const int tall = n + 1 < step.tiles_n ? 2 * half : half;
    Item* out = items + StartOf(p, layout, s).items + ItemsBefore(step, layout, expert) +
                pair * (2 * half + odd);
    for (int i = threadIdx.x % 32; i < tall + odd; i += 32) {
      const bool wide = i == tall;
      const int column = i >= half && !wide;
      const int m = wide ? tiles_m - 1 : 2 * (i - column * half);
      out[i] = {Item::Kind(s, wide), expert, first_m + m, n + column};
    }
  }
}

// The key of a wave of a step behind the first, of which the last item belongs to `expert`. It
// grows with the expert. The key of a wave of the first step is its index.
__device__ inline int WaveKey(const PlanProblem& p, const Layout& layout, int step, int expert) {
  const int last_needed = ItemsBefore(p.steps[0], layout, expert + 1) - 1;
  return max(last_needed, 0) / kWaveItems + p.steps[step].lag;
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

// Waves of a step with a key below `bound`.
__device__ inline int WavesBelow(const PlanProblem& p, const Layout& layout, int step, int bound) {
  const int experts = p.dims.experts_per_rank();
  const int items = ItemsBefore(p.steps[step], layout, experts);
  if (step == 0) return max(0, min(bound, WavesOf(items)));
  const int expert =
      FirstExpert(experts, [&](int e) { return WaveKey(p, layout, step, e) >= bound; });
  // Those of which the last item belongs to an expert before this one.
  const int below = ItemsBefore(p.steps[step], layout, expert);
  return below == items ? WavesOf(items) : below / kWaveItems;
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
      key = WaveKey(p, layout, step, expert);
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
