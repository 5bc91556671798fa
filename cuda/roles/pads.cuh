// Zeros for the pads of the pools that products over rows read: those that share 64 rows with a
// row.
//
// threads    one
#pragma once

#include "pipeline/shared_memory.cuh"
#include "ptx/sync.cuh"
#include "ptx/tma.cuh"

namespace megamoe {

template <typename Steps>
class PadZeros {
  using Params = typename Steps::Params;

 public:
  // With zeros of its own in shared memory, from `address` on.
  __device__ __forceinline__ PadZeros(const Params& params, uint32_t address)
      : p_(params), address_(address) {}

  // Before the first ones are stored.
  __device__ __forceinline__ void Write() const {
    for (uint32_t at = 0; at < kBytes; at += sizeof(uint4)) {
      ptx::StoreShared(address_ + at, uint4{0, 0, 0, 0});
    }
    ptx::FenceAsyncShared();
  }

  // Stores those of the rows [first, end) of a claim, as a group of stores; false if nobody reads
  // them.
  __device__ __forceinline__ bool Store(int first, int end) const {
    const int half = first / kConsumerRows * kConsumerRows;
    if (p_.plan.row_slot[half] < 0) return false;  // no row in these 64
#pragma unroll 1
    for (int row = first; row < end; ++row) StoreRow(row);
    ptx::StoreCommit();
    return true;
  }

 private:
  // Behind the pieces of the dispatch.
  static constexpr uint32_t kBytes =
      (kCombineBatches * sizeof(Batch) - kNumPieces * kPieceBytes) / 16 * 16;
  static_assert(kBytes >= 128, "a row has a multiple of that");

  __device__ __forceinline__ void StoreRow(int row) const {
    const uint32_t row_bytes = p_.H * 2;
#pragma unroll
    for (int i = 0; i < Steps::kDispatched; ++i) {
      uint4* const to = Steps::DispatchTo(p_, i) + int64_t{row} * p_.H / kVector;
      for (uint32_t at = 0; at < row_bytes; at += kBytes) {
        ptx::BulkStore(to + at / sizeof(uint4), address_, min(kBytes, row_bytes - at));
      }
    }
  }

  const Params& p_;
  const uint32_t address_;
};

}  // namespace megamoe
