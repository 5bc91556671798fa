// The staging buffers of a consumer, as it fills them.
//
// A chunk is 64 rows x 128 bytes with the 128-byte swizzle, in which the index of a 16-byte column
// is xor-ed with the row: what a TMA store reads. Chunks take the buffers in turn.
#pragma once

#include "pipeline/delay.cuh"
#include "pipeline/shared_memory.cuh"
#include "ptx/wgmma.cuh"

namespace megamoe {

class Staging {
 public:
  __device__ __forceinline__ Staging(SharedMemory& shared, int consumer)
      : shared_(shared), consumer_(consumer) {}

  // What lasts from item to item, for who keeps it elsewhere meanwhile.
  __device__ __forceinline__ uint32_t turns() const { return turns_; }
  __device__ __forceinline__ void set_turns(uint32_t turns) { turns_ = turns; }

  // Waits until the buffer of the chunk has been stored; the chunks of an item are closed in order.
  __device__ __forceinline__ void Open(int chunk) {
    const uint32_t buffer = chunk % kStagingBuffers;
    Delay(DelaySite::kMultiply, chunk + 4 * turns_);
    ptx::BarrierWait(AddressOf(shared_.staging_empty[consumer_], buffer),
                     (turns_ >> buffer & 1) ^ 1);
    turns_ ^= 1u << buffer;
    ptx::PinRegister(turns_);  // and keeps nothing that was made of it for the next chunk
  }

  // 16 columns of bf16 from column 16 c of the chunk on, as a product leaves them in the warpgroup.
  __device__ __forceinline__ void Put(int chunk, int c, const uint32_t (&packed)[4]) const {
    PutAt(Columns(threadIdx.x), chunk, c, packed);
  }
  // columns: of the thread; a finish with few registers makes them anew each time.
  static __device__ __forceinline__ void PutAt(uint32_t columns, int chunk, int c,
                                               const uint32_t (&packed)[4]) {
    ptx::StoreMatrix((columns ^ c * 32) + chunk % kStagingBuffers * ptx::kChunkBytes, packed);
  }
  // Where the thread's share of the first 16 columns of the first buffer lies.
  __device__ __forceinline__ uint32_t Columns(uint32_t thread) const {
    const uint32_t lane = thread % kWarpThreads;
    const uint32_t row = WarpRow(thread) + lane % 16;
    return RowAddress(0, row) + (lane / 16 * 16 ^ row % 8 * 16);
  }

  // 8 columns of float32 from column 8 c of the chunk on: d[0], d[1] in the thread's first row,
  // d[2], d[3] eight rows below.
  __device__ __forceinline__ void Put(int chunk, int c, float d0, float d1, float d2,
                                      float d3) const {
    const uint32_t lane = threadIdx.x % kWarpThreads;
    const uint32_t row = WarpRow(threadIdx.x) + lane / 4;
    const uint32_t at = RowAddress(chunk, row) + ((c * 32 + lane % 4 * 8) ^ (row % 8 * 16));
    ptx::StoreShared(at, d0, d1);
    ptx::StoreShared(at + 8 * kRowBytes, d2, d3);
  }

  // 8 columns of codes from column 8 j of the chunk on: two codes in the thread's first row, and
  // two eight rows below.
  __device__ __forceinline__ void PutCodes(int chunk, int j, uint16_t first,
                                           uint16_t second) const {
    const uint32_t thread = ThreadAnew();
    const uint32_t lane = thread % kWarpThreads;
    const uint32_t row = WarpRow(thread) + lane / 4;
    const uint32_t at = RowAddress(chunk, row) + ((j * 8 + lane % 4 * 2) ^ (row % 8 * 16));
    ptx::StoreShared(at, first);
    ptx::StoreShared(at + 8 * kRowBytes, second);
  }

  // Hands the buffer to the store warp.
  __device__ __forceinline__ void Close(int chunk) const {
    const uint32_t buffer = chunk % kStagingBuffers;
    ptx::FenceAsyncShared();
    __syncwarp();
    if (threadIdx.x % kWarpThreads == 0) {
      ptx::BarrierArrive(AddressOf(shared_.staging_full[consumer_], buffer));
    }
  }

 private:
  static constexpr uint32_t kRowBytes = 128;

  static __device__ __forceinline__ uint32_t WarpRow(uint32_t thread) {
    return thread % kGroupThreads / kWarpThreads * 16;
  }
  __device__ __forceinline__ uint32_t RowAddress(int chunk, uint32_t row) const {
    return AddressOf(shared_.staging[consumer_], chunk % kStagingBuffers) + row * kRowBytes;
  }

  SharedMemory& shared_;
  const int consumer_;
  uint32_t turns_ = 0;  // a parity bit for each buffer
};

}  // namespace megamoe
