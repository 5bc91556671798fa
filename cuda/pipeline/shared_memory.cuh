// The shared memory of a block, and the rings that live in it.
//
// Who arrives on which barrier, and what an arrival says:
//   stage_full     load (1, with the bytes)   the stage holds its operand tiles
//   stage_empty    multiply (8 warps of each block of the pair)   no product or finish of the warp
//                  reads the stage any more: either block may copy into the stage of both
//   item_full      load (1, with the bytes)   the ring slot holds the next item
//   item_empty     all that read items, of both blocks, at the first block's: the slot is read
//   staging_full   multiply (4: each warp of one consumer)  a chunk of the result is written
//   staging_empty  store (1)                  the chunk has been read by its TMA store
//   piece_full     dispatch (1, with the bytes)           the piece of a row is there
//   batch_full     combine (1, with the bytes)            the rows of a batch are there
//   gate_up_made   multiply (8: each warp)    g and u of the item are in memory
//   products_end   multiply (8: each warp)    no product of the block is left to do
#pragma once

#include <cstddef>
#include <cstdint>

#include "pipeline/item.cuh"
#include "ptx/sync.cuh"
#include "ptx/wgmma.cuh"
#include "shared/problem.h"

namespace megamoe {

constexpr int kVector = 8;          // bf16 in 16 bytes
constexpr int kGroupThreads = 128;  // a warpgroup
constexpr int kGroupWarps = kGroupThreads / kWarpThreads;
constexpr int kNumConsumers = 2;  // warpgroups that multiply
constexpr int kConsumerWarps = kNumConsumers * kGroupWarps;
// The warps of a block that read items: load, store and all that multiply.
constexpr int kItemReaders = 2 + kConsumerWarps;
constexpr int kBlockThreads = (1 + kNumConsumers) * kGroupThreads;
constexpr int kConsumerRows = kTileRows / kNumConsumers;

constexpr int kNumStages = 3;
constexpr int kBlockK = 64;
constexpr int kBlockCodesK = 128;  // of FP8, as many bytes
constexpr int kTileColumns = 256;
constexpr int kItemSlots = 4;
constexpr int kStagingBuffers = 3;  // of each consumer

constexpr uint32_t kStageABytes = kTileRows * kBlockK * 2;
constexpr uint32_t kStageBBytes = kTileColumns * kBlockK * 2;
constexpr uint32_t kStageBytes = kStageABytes + kStageBBytes;

// Rows of o on their way to the sums: a batch is all routes of a token, and as many columns as fit.
// Two warps sum with batches of their own; the warps that multiply join at the end, and theirs lie
// in the stages.
constexpr uint32_t kBatchBytes = 8192;
constexpr int kTreeLevels = 3;  // of the summation tree, at most
constexpr int kCombineWarps = 2;
constexpr int kCombineBatches = 2;  // of each of those warps
constexpr int kAllCombineBatches = kCombineWarps * kCombineBatches;
constexpr int kHelperBatches = 2;

struct alignas(16) Batch {
  struct alignas(8) Route {
    float weight;
    uint32_t next;  // see pipeline/batch_sum.cuh
  };

  struct alignas(16) Shape {
    uint4* to;  // of the sums
    int16_t columns;
    uint16_t row_bytes;  // from one row to the next
    int32_t ended;       // the token, if this is its last batch, or -1
  };

  uint8_t rows[kBatchBytes];
  Route routes[kWarpThreads];  // in the order of the sum, as the rows
  Shape shape;
};
static_assert(kConsumerWarps * kHelperBatches * sizeof(Batch) <= kNumStages * kStageBytes);

// Rows of x (or dy) on their way to the pool, in the same buffers, before the sums.
constexpr uint32_t kPieceBytes = 4096;
constexpr uint32_t kNumPieces = 4;
constexpr uint32_t kPieceEnds = 16;
struct PieceEnd {
  uint4* to;  // in a pool
  uint16_t bytes;
  uint16_t array;  // which one is copied
  int32_t of;      // see roles/dispatch.cuh
};

struct SharedMemory {
  alignas(1024) uint8_t stages[kNumStages][kStageBytes];  // A, then B
  alignas(1024) uint8_t staging[kNumConsumers][kStagingBuffers][ptx::kChunkBytes];
  alignas(128) Batch combine[kAllCombineBatches];
  PairItem items[kItemSlots];
  uint64_t batch_full[kAllCombineBatches + kConsumerWarps * kHelperBatches];
  PieceEnd piece_ends[kCombineWarps][kPieceEnds];
  uint64_t piece_full[kCombineWarps][kNumPieces];
  uint64_t stage_full[kNumStages];
  uint64_t stage_empty[kNumStages];
  uint64_t item_full[kItemSlots];
  uint64_t item_empty[kItemSlots];
  uint64_t staging_full[kNumConsumers][kStagingBuffers];
  uint64_t staging_empty[kNumConsumers][kStagingBuffers];
  uint64_t gate_up_made[1];
  uint64_t products_end[1];
};
static_assert(sizeof(SharedMemory) <= 232448, "a block has 227 KB");

// The thread's index, of which the compiler makes nothing before this, to keep it meanwhile.
__device__ __forceinline__ uint32_t ThreadAnew() {
  uint32_t thread = threadIdx.x;
  ptx::PinRegister(thread);
  return thread;
}

__device__ __forceinline__ SharedMemory& BlockMemory() {
  return *static_cast<SharedMemory*>(ptx::DynamicSharedMemory());
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
  init(shared.stage_empty, kPairBlocks * kConsumerWarps);
  init(shared.item_full, 1);
  init(shared.item_empty, kPairBlocks * kItemReaders);
  init(shared.piece_full, 1);
  init(shared.batch_full, 1);
  init(shared.staging_full, 4);
  init(shared.staging_empty, 1);
  init(shared.gate_up_made, kConsumerWarps);
  init(shared.products_end, kConsumerWarps);
  ptx::FenceBarrierInit();
}

// A position in a ring of kSize slots with the parity of its current turn, in one register. A
// producer waits for `empty` with the opposite parity, which a fresh barrier satisfies.
template <int kSize>
class RingPosition {
 public:
  __device__ __forceinline__ uint32_t index() const { return state_ / 2; }
  __device__ __forceinline__ uint32_t parity() const { return state_ % 2; }
  // That before it.
  __device__ __forceinline__ uint32_t last() const {
    return index() == 0 ? kSize - 1 : index() - 1;
  }
  // For who keeps it elsewhere meanwhile.
  __device__ __forceinline__ uint32_t state() const { return state_; }
  __device__ __forceinline__ void set_state(uint32_t state) { state_ = state; }
  __device__ __forceinline__ void Advance() {
    state_ += 2;
    if (state_ >= 2 * kSize) state_ = state_ % 2 ^ 1;
  }

 private:
  uint32_t state_ = 0;
};

// An address in shared memory, of element i of an array of barriers or buffers.
template <typename T>
__device__ __forceinline__ uint32_t AddressOf(const T& array, uint32_t i) {
  return ptx::SharedAddress(&array) + i * static_cast<uint32_t>(sizeof(array[0]));
}

// Tells both blocks of the pair, a lane each: either may copy into the stage of both. memory: the
// address of the block's SharedMemory.
__device__ __forceinline__ void ReleaseStage(uint32_t memory, uint32_t stage) {
  const uint32_t lane = threadIdx.x % kWarpThreads;
  const uint32_t barrier = memory + offsetof(SharedMemory, stage_empty) + stage * sizeof(uint64_t);
  if (lane < kPairBlocks) ptx::BarrierArriveAt(barrier, lane);
}

}  // namespace megamoe
