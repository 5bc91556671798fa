// As cuda/ptx/wgmma.cuh, for the emulated machine.
#pragma once

#include "machine.h"
#include "ptx/layout.cuh"
#include "ptx/math.cuh"

namespace megamoe::ptx {

inline void WgmmaFence() {}
inline void WgmmaCommit() {
  emulator::self->product_groups.push_back(std::move(emulator::self->open_products));
  emulator::self->open_products.clear();
}

// Element (i, k) of an operand, i its row or column, as the hardware finds it from a descriptor.
inline float OperandAt(uint64_t descriptor, int major, int i, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t leading = (descriptor >> 16 & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  const uint32_t k_major = i / 8 * stride + i % 8 * 128 + k * 2;
  const uint32_t mn_major = i / 64 * leading + k / 8 * stride + k % 8 * 128 + i % 64 * 2;
  const uint32_t address = start + (major == static_cast<int>(Major::kK) ? k_major : mn_major);
  uint16_t bits;
  std::memcpy(&bits, emulator::SharedAt(emulator::self->block, emulator::Swizzled(address)), 2);
  return __uint_as_float(uint32_t{bits} << 16);
}

// The thread's elements of a product of 16 k.
inline void Multiply(const emulator::Product& p) {
  constexpr int kK = 16;
  const int thread = emulator::self->thread % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  float a[2][kK];
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < kK; ++k) a[r][k] = OperandAt(p.a, p.major_a, row + 8 * r, k);
  }
  for (int j = 0; j < p.columns / 8; ++j) {
    for (int c = 0; c < 2; ++c) {
      float sums[2] = {0, 0};
      for (int k = 0; k < kK; ++k) {
        const float b = OperandAt(p.b, p.major_b, 8 * j + column + c, k);
        for (int r = 0; r < 2; ++r) sums[r] += a[r][k] * b;
      }
      for (int r = 0; r < 2; ++r) {
        float& d = p.d[4 * j + 2 * r + c];
        d = p.accumulate ? d + sums[r] : sums[r];
      }
    }
  }
}
template <int kPending>
void WgmmaWait() {
  auto& groups = emulator::self->product_groups;
  while (groups.size() > kPending) {
    for (const emulator::Product& product : groups.front()) Multiply(product);
    groups.pop_front();
  }
}
template <Major kMajorA, Major kMajorB, int kAccumulators>
void Wgmma(uint64_t a, uint64_t b, float (&d)[kAccumulators], bool accumulate) {
  emulator::self->open_products.push_back({a, b, d, 2 * kAccumulators, static_cast<int>(kMajorA),
                                           static_cast<int>(kMajorB), accumulate});
}
template <typename T, int N>
void PinRegisters(T (&)[N]) {}
template <typename T>
void PinRegister(T&) {}
inline void EndBlock() {}

// Lane l says where row l % 8 of matrix l / 8 goes; of row r a matrix comes from lanes 4 r to 4 r
// + 3.
inline void StoreMatrix(uint32_t address, const uint32_t (&m)[4]) {
  const int lane = emulator::self->thread % emulator::kWarpThreads;
  const uint32_t* rows = emulator::Gather(4, address);
  for (int i = 0; i < 4; ++i) {
    const uint32_t to = rows[8 * i + lane / 4] + lane % 4 * 4;
    std::memcpy(emulator::SharedAt(emulator::self->block, to), &m[i], sizeof(m[i]));
  }
}
inline void StoreShared(uint32_t address, float v0, float v1) {
  if (address % 8 != 0) emulator::Fail("8 bytes lie at a multiple of 8");
  const float v[] = {v0, v1};
  std::memcpy(emulator::SharedAt(emulator::self->block, address), v, sizeof(v));
}

}  // namespace megamoe::ptx
