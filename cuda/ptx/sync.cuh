// Barriers, fences, flags and warp election: thin names for one instruction each.
#pragma once

#include <cstdint>

namespace megamoe {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace megamoe

namespace megamoe::ptx {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// The shared memory that the launch gives the block.
__device__ __forceinline__ void* DynamicSharedMemory() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return memory;
}

// ---- mbarriers in shared memory; `parity` is that of the phase waited for ----

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether the phase is complete; does not wait.
__device__ __forceinline__ bool BarrierTest(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// ---- launches that begin before the kernel ahead of them in the stream has ended ----

// Lets the next kernel of the stream take the place of blocks that end.
__device__ __forceinline__ void LetNextKernelStart() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
// Waits until the kernel ahead has ended and what it wrote can be read.
__device__ __forceinline__ void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- clusters: the blocks of one see each other's shared memory ----

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// Waits for all threads of all blocks of the cluster.
__device__ __forceinline__ void ClusterSync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
// Arrives at the barrier that lies at this block's `barrier` in block `rank`: what this block has
// read may be overwritten. It announces nothing that was written.
//
// Of CTA scope, since a release of cluster scope also waits for stores to global memory, 1350 to
// 1600 cycles on an H200. What it orders are reads of shared memory. Those of products have ended,
// by WgmmaWait. Those of loads need FenceAsyncShared behind them, in each lane, if it is copies
// that overwrite what was read, which are of another proxy. For sm_90a ptxas 13.0 makes of that
// fence and this arrival what it makes of the async::generic release fence of cluster scope and a
// relaxed arrival of that scope, which is what the memory model asks for; the acquire fence that
// belongs behind the wait is no instruction. StoreAt is of the same proxy as loads: an SM takes up
// its accesses of shared memory and its arrivals in order.
__device__ __forceinline__ void BarrierArriveAt(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Writes 16 bytes to `shared` of block `rank`; they count on the barrier there.
__device__ __forceinline__ void StoreAt(uint32_t shared, uint32_t barrier, uint32_t rank, uint4 v) {
  asm volatile(
      "{\n"
      ".reg .b32 there, barrier;\n"
      "mapa.shared::cluster.u32 there, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%3,%4,%5,%6}, "
      "[barrier];\n"
      "}" ::"r"(shared),
      "r"(barrier), "r"(rank), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
      : "memory");
}

// ---- proxies: ordinary accesses before the fence are ordered with asynchronous ones after it ----

__device__ __forceinline__ void FenceAsyncShared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void FenceAsyncGlobal() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ---- flags in global memory, seen by the whole system: peers and the host ----

__device__ __forceinline__ uint32_t LoadAcquireSystem(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t LoadRelaxedSystem(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void StoreReleaseSystem(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}

// Orders what this thread has seen and written before with all that it writes after.
__device__ __forceinline__ void FenceSystem() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// ---- flags in global memory, seen by the whole GPU ----

__device__ __forceinline__ uint32_t LoadAcquire(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t LoadRelaxed(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
__device__ __forceinline__ void AddRelease(uint32_t* flag, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
// With FenceRelease before it as AddRelease.
__device__ __forceinline__ void AddRelaxed(uint32_t* flag, uint32_t value) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
__device__ __forceinline__ void FenceRelease() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
// Adds 1 and returns what the word was; ordered with nothing. An instruction that wraps at 2^32,
// since ptxas has the lanes of a warp share an ordinary addition, for which they wait at once.
__device__ __forceinline__ uint32_t FetchIncrement(uint32_t* word) {
  uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], 0xfffffffe;"
               : "=r"(old)
               : "l"(word)
               : "memory");
  return old;
}

// Adds 1, or writes 0 in place of `end`, and returns what the word was.
__device__ __forceinline__ uint32_t FetchIncrementBelow(uint32_t* word, uint32_t end) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(word), "r"(end - 1)
               : "memory");
  return old;
}

// ---- 16 bytes of global memory that nobody reads soon again: the first to leave the caches ----

__device__ __forceinline__ uint4 LoadStreaming(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.cs.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ void StoreStreaming(uint4* to, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// ---- shared memory, 16 bytes or 8 ----

__device__ __forceinline__ uint4 LoadShared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 LoadShared8(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}

// ---- warps ----

// True in one lane of the converged warp. Under `if (lane == 0)` ptxas would wrap every TMA of the
// branch in a loop over lanes.
__device__ __forceinline__ bool ElectOne() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(elected));
  return elected != 0;
}

template <int kRegisters>
__device__ __forceinline__ void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Nanoseconds since an arbitrary start, the same for all SMs; its step is about 1 us.
__device__ __forceinline__ uint64_t GlobalTimerNs() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// Of the multiprocessor that this thread runs on.
__device__ __forceinline__ uint32_t MultiprocessorIndex() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(index));
  return index;
}

}  // namespace megamoe::ptx
