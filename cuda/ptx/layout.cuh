// The shared-memory layouts that matrix products read.
#pragma once

#include <cstdint>

namespace megamoe::ptx {

// The order of an operand's elements in shared memory, in 128-byte swizzled atoms: K-major atoms
// hold 64 k of a row, MN-major atoms 64 rows (or columns) of a k.
enum class Major : int { kK = 0, kMN = 1 };

// A chunk is what one TMA box of 64 x 64 bf16, or 64 x 128 bytes, fills.
constexpr uint32_t kChunkBytes = 64 * 64 * 2;

// Descriptor of an operand tile at `address`, in steps of 16 bytes. K-major: chunks follow each
// other along the rows. MN-major: chunks of 64 columns x 64 k follow each other along the columns.
template <Major kMajor>
__device__ __forceinline__ constexpr uint64_t TileDescriptor(uint32_t address) {
  constexpr uint64_t kLeading = (kMajor == Major::kK ? 16 : kChunkBytes) >> 4;
  constexpr uint64_t kStride = 1024 >> 4;  // from 8 rows (or k) to the next 8
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return (address & 0x3ffff) >> 4 | kLeading << 16 | kStride << 32 | kSwizzle128;
}
// Descriptor distance of 16 k.
template <Major kMajor>
constexpr uint64_t kDescriptor16K = (kMajor == Major::kK ? 32 : 2048) >> 4;
// The same of 32 k of one byte, which are K-major.
constexpr uint64_t kDescriptor32Codes = 32 >> 4;

}  // namespace megamoe::ptx
