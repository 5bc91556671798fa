// Pieces of rows on their way through shared memory, by bulk copies: some coming in, the others
// going out, so that several are under way at any time. A warp does it all, with all lanes: each
// stores and publishes what is its own.
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace megamoe {

// Calls store(end, address of the piece) when a piece is there, which issues its stores, and
// publish(end) when those are in memory, in the order of the pieces.
template <typename Store, typename Publish>
class PieceRing {
 public:
  __device__ __forceinline__ PieceRing(SharedMemory& shared, int comm_warp, Store store,
                                       Publish publish)
      : pieces_(AddressOf(shared.combine, comm_warp * kCombineBatches)),
        piece_full_(AddressOf(shared.piece_full[comm_warp], 0)),
        ends_(shared.piece_ends[comm_warp]),
        store_(store),
        publish_(publish) {}

  // Behind the pieces.
  __device__ __forceinline__ uint32_t behind() const { return pieces_ + kNumPieces * kPieceBytes; }

  __device__ __forceinline__ void Load(const uint4* from, uint32_t bytes, const PieceEnd& end) {
    if (num_loaded_ - num_stored_ == kLoading) StoreOldest();
    // The piece's last store has read it when all but the kStoring - 1 latest have.
    ptx::StoreWaitRead<static_cast<int>(kStoring) - 1>();
    __syncwarp();
    if (threadIdx.x % kWarpThreads == 0) {
      const uint32_t piece = num_loaded_ % kNumPieces;
      const uint32_t barrier = piece_full_ + piece * sizeof(uint64_t);
      ends_[num_loaded_ % kPieceEnds] = end;
      ptx::BarrierArriveExpect(barrier, bytes);
      ptx::BulkLoad(pieces_ + piece * kPieceBytes, from, bytes, barrier);
    }
    ++num_loaded_;
  }

  // Waits until all pieces are in memory and published.
  __device__ __forceinline__ void Drain() {
    while (num_stored_ < num_loaded_) StoreOldest();
    ptx::StoreWaitAll();
    PublishUpTo(num_stored_);
  }

 private:
  // Pieces on their way in; the others are on their way out.
  static constexpr uint32_t kLoading = kNumPieces / 2;
  static constexpr uint32_t kStoring = kNumPieces - kLoading;
  static_assert(kNumPieces * kPieceBytes <= kCombineBatches * sizeof(Batch));
  static_assert(kLoading + kStoring < kPieceEnds, "an end is kept until it is published");

  __device__ __forceinline__ void StoreOldest() {
    const uint32_t piece = num_stored_ % kNumPieces;
    const uint32_t barrier = piece_full_ + piece * sizeof(uint64_t);
    ptx::BarrierWait(barrier, num_stored_ / kNumPieces % 2);
    __syncwarp();  // the first lane has written its end
    Delay(DelaySite::kDispatch, num_stored_);
    store_(ends_[num_stored_ % kPieceEnds], pieces_ + piece * kPieceBytes);
    ptx::StoreCommit();
    ++num_stored_;
    if (HasFault(SeededFault::kAnnounceBeforeCopies)) PublishUpTo(num_stored_);
    if (num_stored_ > kStoring) {
      ptx::StoreWait<static_cast<int>(kStoring)>();
      PublishUpTo(num_stored_ - kStoring);
    }
  }

  // The first `num_pieces` are in memory.
  __device__ __forceinline__ void PublishUpTo(uint32_t num_pieces) {
    for (; num_published_ < num_pieces; ++num_published_) {
      publish_(ends_[num_published_ % kPieceEnds], num_published_);
    }
  }

  const uint32_t pieces_;
  const uint32_t piece_full_;
  PieceEnd* const ends_;
  Store store_;
  Publish publish_;
  uint32_t num_loaded_ = 0;
  uint32_t num_stored_ = 0;
  uint32_t num_published_ = 0;
};

}  // namespace megamoe
