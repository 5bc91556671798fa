// Random delays, to hunt races: a test build (MEGAMOE_DELAYS) stops warps for a while at named
// sites, which moves every event of the protocol against every other. Other builds have no code
// here.
//
// Each role calls Delay where it issues a copy, finishes a piece of work or signals it. `event`
// says which thing that is (an item's row + k, a chunk, a token): with seed, site, block and warp
// it decides the delay, so a seed stands for one set of delays, although what they meet depends on
// the machine.
#pragma once

#include <cstdint>

#include "pipeline/delay_sites.h"

namespace megamoe {

#ifdef MEGAMOE_DELAYS

// Written by the host between calls, constant during one; 0 means no delays.
static __constant__ uint32_t delay_seed;
// Long delays at each site since the seed was set; added to by warps, read by the host.
static __device__ uint32_t num_delays[kNumDelaySites];

// Mixes 32 bits, one to one, so that all of them depend on each.
__device__ __forceinline__ uint32_t Mixed(uint32_t bits) {
  bits = (bits ^ bits >> 16) * 0x85ebca6bu;
  bits = (bits ^ bits >> 13) * 0xc2b2ae35u;
  return bits ^ bits >> 16;
}

// Called by one lane or by a whole warp, with the same event in all lanes: they get one delay.
__device__ __forceinline__ void Delay(DelaySite site, uint32_t event) {
  const uint32_t number = static_cast<uint32_t>(site);
  // A seed slows some roles and leaves the others fast, since a role far behind its peers shows
  // more than all of them a little late; each slows at least the role of its own number.
  const uint32_t slow = Mixed(delay_seed) | 1u << delay_seed % kNumDelaySites;
  if (delay_seed == 0 || (slow >> number & 1) == 0) return;
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t random = Mixed(Mixed(Mixed(delay_seed) ^ (blockIdx.x * 64 + warp)) ^ event);
  constexpr uint32_t kOneIn = 64;  // is long, another one short
  constexpr uint32_t kLongNs = 20000;
  constexpr uint32_t kShortNs = 500;
  const uint32_t kind = (random ^ number) % kOneIn;
  if (kind > 1) return;
  __nanosleep(random / kOneIn % (kind == 0 ? kLongNs : kShortNs));
  const bool leads = threadIdx.x % 32 == __ffs(__activemask()) - 1;
  if (kind == 0 && leads) atomicAdd(num_delays + number, 1u);
}

#else

__device__ __forceinline__ void Delay(DelaySite, uint32_t) {}

#endif

}  // namespace megamoe
