// The shared memory of a block, and the rings that live in it.
//
// Who arrives on which barrier, and what an arrival says:
//   stage_full     load (1, with the bytes)   the stage holds its operand tiles
//   stage_empty    multiply (8: each warp)    no product of the warp reads the stage any more
//   item_full      load (1)                   the ring slot holds the next item
//   item_empty     multiply (8), store (1)    the warp has read the slot
//   staging_full   multiply (4: each warp of one consumer)  a chunk of the result is written
//   staging_empty  store (1)                  the chunk has been read by its TMA store
//   piece_full     dispatch (1, with the bytes)           the piece of x is there
//   batch_full     combine (1, with the bytes)            the rows of a batch are there
#pragma once

#include <cstdint>

#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "shared/problem.h"

namespace megamoe {

constexpr int kWarpThreads = 32;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kVector = 8;          // bf16 in 16 bytes
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kNumConsumers = 2;    // warpgroups that multiply
constexpr int kConsumerWarps = kNumConsumers * 4;
constexpr int kBlockThreads = (1 + kNumConsumers) * kGroupThreads;
constexpr int kConsumerRows = kTileRows / kNumConsumers;

constexpr int kNumStages = 3;
constexpr int kBlockK = 64;
constexpr int kTileColumns = 256;
constexpr int kItemSlots = 4;
constexpr int kStagingBuffers = 2;  // of each consumer

constexpr uint32_t kStageABytes = kTileRows * kBlockK * 2;
constexpr uint32_t kStageBytes = kStageABytes + kTileColumns * kBlockK * 2;

// Rows of o on their way to the sums: a batch is up to 8 rows of up to 512 columns. Two warps sum
// with buffers of their own; the warps that multiply join at the end and reuse the stages.
constexpr int kBatchRows = 8;
constexpr int kBatchColumns = 512;
constexpr uint32_t kBatchRowBytes = kBatchColumns * 2;
constexpr uint32_t kBatchBytes = kBatchRows * kBatchRowBytes;
constexpr int kCombineWarps = 2;
constexpr int kCombineBuffers = 3;  // of each of those warps
constexpr int kAllCombineBuffers = kCombineWarps * kCombineBuffers;
constexpr int kHelperBuffers = 2;
static_assert(kConsumerWarps * kHelperBuffers * kBatchBytes <= kNumStages * kStageBytes);

// Rows of x on their way to the pool, in the same buffers, before the sums.
constexpr int kPieceColumns = 2048;
constexpr uint32_t kPieceBytes = kPieceColumns * 2;
constexpr uint32_t kNumPieces = 6;
constexpr uint32_t kPieceEnds = 16;
struct PieceEnd {
  int64_t to;  // first element of the pool
  uint32_t bytes;
  int32_t tile;  // see roles/dispatch.cuh
};

// What a batch is, for the warp that sums it.
struct alignas(16) BatchHeader {
  float weight[kBatchRows];
  int32_t token;
  int32_t column;     // first of the batch, in bf16
  uint16_t num_ends;  // 2 bits a row, see roles/combine.cuh
  uint8_t num_rows;
  bool is_first;  // of its token and columns
  bool is_last;
};

// One item as the warps of a block see it.
struct alignas(16) TileItem {
  int16_t step;           // kNoMoreItems ends the walk
  int16_t num_consumers;  // 1 when the upper 64 rows of the tile are all pads
  int32_t expert;
  int32_t row;  // first pool row
  int32_t n;
};
constexpr int16_t kNoMoreItems = -1;

struct SharedMemory {
  alignas(1024) uint8_t stages[kNumStages][kStageBytes];  // A, then B
  alignas(1024) uint8_t staging[kNumConsumers][kStagingBuffers][ptx::kChunkBytes];
  alignas(128) uint8_t combine[kAllCombineBuffers][kBatchBytes];
  TileItem items[kItemSlots];
  BatchHeader batches[kAllCombineBuffers + kConsumerWarps * kHelperBuffers];
  uint64_t batch_full[kAllCombineBuffers + kConsumerWarps * kHelperBuffers];
  PieceEnd piece_ends[kCombineWarps][kPieceEnds];
  uint64_t piece_full[kCombineWarps][kNumPieces];
  uint64_t stage_full[kNumStages];
  uint64_t stage_empty[kNumStages];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  uint64_t staging_full[kNumConsumers][kStagingBuffers];
  uint64_t staging_empty[kNumConsumers][kStagingBuffers];
};
static_assert(sizeof(SharedMemory) <= 232448, "a block has 227 KB");

__device__ __forceinline__ SharedMemory& BlockMemory() {
  extern __shared__ __align__(1024) uint8_t memory[];
  return *reinterpret_cast<SharedMemory*>(memory);
}

// Initialises every barrier; one thread calls it, and the block synchronises afterwards.
__device__ inline void InitBarriers(SharedMemory& shared) {
  const auto init = [](auto& barriers, uint32_t arrivals) {
    auto* first = reinterpret_cast<uint64_t*>(&barriers);
    for (unsigned i = 0; i < sizeof(barriers) / sizeof(uint64_t); ++i) {
      ptx::BarrierInit(ptx::SharedAddress(first + i), arrivals);
    }
  };
  init(shared.stage_full, 1);
  init(shared.stage_empty, kConsumerWarps);
  init(shared.item_full, 1);
  init(shared.item_empty, kConsumerWarps + 1);
  init(shared.piece_full, 1);
  init(shared.batch_full, 1);
  init(shared.staging_full, 4);
  init(shared.staging_empty, 1);
  ptx::FenceBarrierInit();
}

// A position in a ring of kSize slots with the parity of its current turn. A producer waits for
// `empty` with the opposite parity, which a fresh barrier satisfies.
template <int kSize>
struct RingPosition {
  uint32_t index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void Advance() {
    if (++index == kSize) {
      index = 0;
      parity ^= 1;
    }
  }
};

// An address in shared memory, of element i of an array of barriers or buffers.
template <typename T>
__device__ __forceinline__ uint32_t AddressOf(const T& array, uint32_t i) {
  return ptx::SharedAddress(&array) + i * static_cast<uint32_t>(sizeof(array[0]));
}

// Walks the items that the load warp announces, until the last one. Each warp of the multiply and
// store roles has its own walk; `f` gets the item.
template <typename F>
__device__ __forceinline__ void ForEachItem(SharedMemory& shared, F f) {
  RingPosition<kItemSlots> slot;
  for (;;) {
    ptx::BarrierWait(AddressOf(shared.item_full, slot.index), slot.parity);
    const TileItem item = shared.items[slot.index];
    __syncwarp();
    if (ptx::ElectOne()) ptx::BarrierArrive(AddressOf(shared.item_empty, slot.index));
    slot.Advance();
    if (item.step == kNoMoreItems) return;
    f(item);
  }
}

}  // namespace megamoe
