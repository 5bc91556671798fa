// Bulk tensor copies (TMA). Loads complete on an mbarrier, stores in a group of the issuing thread.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace megamoe::ptx {

// L2 eviction priorities, as createpolicy encodes them.
constexpr uint64_t kEvictNormal = 0x1000000000000000;
constexpr uint64_t kEvictLast = 0x14F0000000000000;

__device__ __forceinline__ void TmaLoad(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                        int x, int y, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3,%4}], [%2], %5;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy)
      : "memory");
}
__device__ __forceinline__ void TmaLoad(uint32_t shared, const CUtensorMap& map, uint32_t barrier,
                                        int x, int y, int z, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3,%4,%5}], [%2], %6;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}
// The same into every block of the cluster whose bit is set in `blocks`: each gets the bytes at the
// same place of its shared memory, and they count on its own barrier there.
__device__ __forceinline__ void TmaMulticast(uint32_t shared, const CUtensorMap& map,
                                             uint32_t barrier, int x, int y, uint64_t policy,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3,%4}], [%2], %6, %5;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "l"(policy), "h"(blocks)
      : "memory");
}
__device__ __forceinline__ void TmaMulticast(uint32_t shared, const CUtensorMap& map,
                                             uint32_t barrier, int x, int y, int z, uint64_t policy,
                                             uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3,%4,%5}], [%2], %7, %6;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x), "r"(y), "r"(z), "l"(policy), "h"(blocks)
      : "memory");
}
// Plain bytes, a multiple of 16; completes on the barrier like a tensor.
__device__ __forceinline__ void BulkLoad(uint32_t shared, const void* global, uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void BulkStore(void* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void TmaStore(const CUtensorMap& map, uint32_t shared, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2,%3}], [%1];" ::"l"(&map),
      "r"(shared), "r"(x), "r"(y)
      : "memory");
}
// Adds the float32 elements of the box to those in memory.
__device__ __forceinline__ void TmaAdd(const CUtensorMap& map, uint32_t shared, int x, int y) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%0, {%2,%3}], [%1];" ::"l"(
          &map),
      "r"(shared), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void StoreCommit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until all but the last kPending groups have read their shared memory.
template <int kPending>
__device__ __forceinline__ void StoreWaitRead() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Waits until all but the last kPending groups have been written to memory.
template <int kPending>
__device__ __forceinline__ void StoreWait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void StoreWaitAll() { StoreWait<0>(); }

}  // namespace megamoe::ptx
