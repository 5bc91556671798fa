// Loads and stores with a memory order at system scope, and clocks.
#pragma once

#include <cstdint>

namespace megamoe::ptx {

__device__ inline uint32_t LoadAcquireSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline uint32_t LoadRelaxedSystem(const uint32_t* address) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

__device__ inline void StoreReleaseSystem(uint32_t* address, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Nanoseconds since an arbitrary start, the same for all SMs; its step is about 1 us.
__device__ inline uint64_t GlobalTimerNs() {
  uint64_t value;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value)::"memory");
  return value;
}

}  // namespace megamoe::ptx
