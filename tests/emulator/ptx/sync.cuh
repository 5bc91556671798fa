// As cuda/ptx/sync.cuh, for the emulated machine: memory is always in order, so fences do nothing.
#pragma once

#include "machine.h"

namespace megamoe {

using emulator::kWarpThreads;
constexpr unsigned kAllLanes = 0xffffffffu;

}  // namespace megamoe

namespace megamoe::ptx {

inline uint32_t SharedAddress(const void* p) {
  const int64_t address = static_cast<const uint8_t*>(p) - emulator::self->block->shared;
  if (address < 0 || address >= emulator::kSharedBytes) emulator::Fail("not in shared memory");
  return static_cast<uint32_t>(address);
}
inline void* DynamicSharedMemory() { return emulator::self->block->shared; }

inline void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  *emulator::BarrierAt(emulator::self->block, barrier) = {0, static_cast<uint8_t>(arrivals),
                                                          static_cast<int16_t>(arrivals), 0};
}
inline void FenceBarrierInit() {}
inline void BarrierArrive(uint32_t barrier) {
  emulator::BarrierAt(emulator::self->block, barrier)->Arrive();
}
inline void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  emulator::Barrier* b = emulator::BarrierAt(emulator::self->block, barrier);
  b->bytes += static_cast<int32_t>(bytes);
  b->Arrive();
}
inline bool BarrierTest(uint32_t barrier, uint32_t parity) {
  return emulator::BarrierAt(emulator::self->block, barrier)->phase != parity;
}
inline void BarrierWait(uint32_t barrier, uint32_t parity) {
  emulator::WaitUntil([=] { return BarrierTest(barrier, parity); });
}

inline void LetNextKernelStart() {}
inline void WaitForPreviousKernel() {}

inline uint32_t ClusterRank() { return emulator::self->block->rank; }
inline void ClusterSync() {
  emulator::Meet(*emulator::self->block->cluster,
                 emulator::kClusterBlocks * emulator::self->block->num_threads());
}
inline void BarrierArriveAt(uint32_t barrier, uint32_t rank) {
  emulator::BarrierAt(emulator::self->block->of_cluster[rank], barrier)->Arrive();
}
inline void StoreAt(uint32_t shared, uint32_t barrier, uint32_t rank, uint4 v) {
  emulator::Block* block = emulator::self->block->of_cluster[rank];
  emulator::Later([=] {
    std::memcpy(emulator::SharedAt(block, shared), &v, sizeof(v));
    emulator::BarrierAt(block, barrier)->Complete(sizeof(v));
  });
}

inline void FenceAsyncShared() {}
inline void FenceSystem() {}
inline void FenceAsyncGlobal() {}

inline uint32_t LoadAcquireSystem(const uint32_t* flag) { return *flag; }
inline uint32_t LoadRelaxedSystem(const uint32_t* flag) { return *flag; }
inline void StoreReleaseSystem(uint32_t* flag, uint32_t value) { *flag = value; }
inline uint32_t LoadAcquire(const uint32_t* flag) {
  emulator::Yield();
  return *flag;
}
inline uint32_t LoadRelaxed(const uint32_t* flag) { return *flag; }
inline void AddRelease(uint32_t* flag, uint32_t value) { *flag += value; }
inline void AddRelaxed(uint32_t* flag, uint32_t value) { *flag += value; }
inline void FenceRelease() {}
inline uint32_t FetchIncrement(uint32_t* word) { return atomicAdd(word, 1); }
inline uint32_t FetchIncrementBelow(uint32_t* word, uint32_t end) {
  emulator::Yield();
  const uint32_t old = *word;
  *word = old + 1 < end ? old + 1 : 0;
  return old;
}

inline uint4 LoadStreaming(const uint4* from) { return *from; }
inline void StoreStreaming(uint4* to, uint4 v) { *to = v; }

inline uint4 LoadShared(uint32_t address) {
  uint4 v;
  std::memcpy(&v, emulator::SharedAt(emulator::self->block, address), sizeof(v));
  return v;
}
inline uint2 LoadShared8(uint32_t address) {
  uint2 v;
  std::memcpy(&v, emulator::SharedAt(emulator::self->block, address), sizeof(v));
  return v;
}
inline void StoreShared(uint32_t address, uint4 v) {
  std::memcpy(emulator::SharedAt(emulator::self->block, address), &v, sizeof(v));
}

inline bool ElectOne() { return emulator::self->thread % emulator::kWarpThreads == 0; }
template <int kRegisters>
void GiveRegisters() {}
template <int kRegisters>
void TakeRegisters() {}
inline uint64_t GlobalTimerNs() { return emulator::num_rounds * emulator::kRoundNs; }
inline uint32_t MultiprocessorIndex() { return emulator::self->block->index; }

}  // namespace megamoe::ptx
