// As cuda/ptx/tma.cuh, for the emulated machine.
#pragma once

#include <cuda.h>

#include "machine.h"

namespace megamoe::ptx {

constexpr uint64_t kEvictNormal = 0;
constexpr uint64_t kEvictLast = 1;

inline void LoadInto(emulator::Block* block, uint32_t shared, const CUtensorMap& map,
                     uint32_t barrier, emulator::Coordinates from) {
  if (shared % 1024 != 0) emulator::Fail("a swizzled box lies at a multiple of 1024");
  const auto* box = reinterpret_cast<const emulator::TensorMap*>(&map);
  emulator::Later([=] {
    emulator::LoadBox(*box, from, block, shared);
    emulator::BarrierAt(block, barrier)->Complete(box->box_bytes());
  });
}
inline void TmaLoad(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y,
                    uint64_t) {
  LoadInto(emulator::self->block, shared, map, barrier, {{x, y, 0}});
}
inline void TmaLoad(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y, int z,
                    uint64_t) {
  LoadInto(emulator::self->block, shared, map, barrier, {{x, y, z}});
}
inline void TmaMulticast(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y,
                         int z, uint64_t, uint16_t blocks) {
  for (int rank = 0; rank < emulator::kClusterBlocks; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    LoadInto(emulator::self->block->of_cluster[rank], shared, map, barrier, {{x, y, z}});
  }
}
inline void TmaMulticast(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x, int y,
                         uint64_t policy, uint16_t blocks) {
  TmaMulticast(shared, map, barrier, x, y, 0, policy, blocks);
}

inline void CheckBulk(uint32_t shared, const void* global, uint32_t bytes) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(global) % 16 == 0;
  if (shared % 16 != 0 || bytes % 16 != 0 || !is_aligned) emulator::Fail("bulk copies take 16s");
}
inline void BulkLoad(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  CheckBulk(shared, global, bytes);
  emulator::Block* block = emulator::self->block;
  emulator::Later([=] {
    std::memcpy(emulator::SharedAt(block, shared), global, bytes);
    emulator::BarrierAt(block, barrier)->Complete(static_cast<int32_t>(bytes));
  });
}

// Reads shared memory at one later moment and calls write(bytes) at another.
template <typename Write>
void StoreFrom(uint32_t shared, uint32_t bytes, Write write) {
  const auto store = std::make_shared<emulator::Store>();
  const uint8_t* from = emulator::SharedAt(emulator::self->block, shared);
  emulator::self->open_stores.push_back(store);
  emulator::Later([=] {
    const std::vector<uint8_t> data(from, from + bytes);
    store->is_read = true;
    emulator::Later([=] {
      write(data);
      store->is_written = true;
    });
  });
}
inline void BulkStore(void* global, uint32_t shared, uint32_t bytes) {
  CheckBulk(shared, global, bytes);
  StoreFrom(shared, bytes, [=](const std::vector<uint8_t>& data) {
    std::memcpy(global, data.data(), data.size());
  });
}
inline void TmaStore(const CUtensorMap& map, uint32_t shared, int x, int y) {
  if (shared % 1024 != 0) emulator::Fail("a swizzled box lies at a multiple of 1024");
  const auto* box = reinterpret_cast<const emulator::TensorMap*>(&map);
  StoreFrom(shared, box->box_bytes(),
            [=](const std::vector<uint8_t>& data) { emulator::StoreBox(*box, {{x, y, 0}}, data); });
}
inline void TmaAdd(const CUtensorMap& map, uint32_t shared, int x, int y) {
  if (shared % 1024 != 0) emulator::Fail("a swizzled box lies at a multiple of 1024");
  const auto* box = reinterpret_cast<const emulator::TensorMap*>(&map);
  if (box->element_bytes != sizeof(float)) emulator::Fail("float32 elements are added");
  StoreFrom(shared, box->box_bytes(),
            [=](const std::vector<uint8_t>& data) { emulator::AddBox(*box, {{x, y, 0}}, data); });
}
inline void StoreCommit() {
  emulator::self->store_groups.push_back(std::move(emulator::self->open_stores));
  emulator::self->open_stores.clear();
}

// Waits until `flag` of all stores is set, but for those of the last `pending` groups.
inline void WaitForStores(size_t pending, bool emulator::Store::* flag) {
  emulator::WaitUntil([pending, flag, &groups = emulator::self->store_groups] {
    for (size_t i = 0; i + pending < groups.size(); ++i) {
      for (const auto& store : groups[i]) {
        if (!((*store).*flag)) return false;
      }
    }
    return true;
  });
}
template <int kPending>
void StoreWaitRead() {
  WaitForStores(kPending, &emulator::Store::is_read);
}
template <int kPending>
void StoreWait() {
  WaitForStores(kPending, &emulator::Store::is_written);
  auto& groups = emulator::self->store_groups;
  while (groups.size() > kPending) groups.pop_front();
}
inline void StoreWaitAll() { StoreWait<0>(); }

}  // namespace megamoe::ptx
