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

constexpr int kProductK = 16;  // of bf16
constexpr int kCodesK = 32;    // of e4m3

// An operand as the hardware finds it from a descriptor.
struct Operand {
  uint32_t start, leading, stride;
  bool is_k_major;

  Operand(uint64_t descriptor, int major)
      : start((descriptor & 0x3fff) << 4),
        leading((descriptor >> 16 & 0x3fff) << 4),
        stride((descriptor >> 32 & 0x3fff) << 4),
        is_k_major(major == static_cast<int>(Major::kK)) {}

  // Reads the elements (i, k) for all k, i its row or column.
  void Read(int i, float (&elements)[kProductK]) const {
    const uint8_t* shared = emulator::self->block->shared;
    if (is_k_major) {
      constexpr int kChunk = 8;  // the swizzle leaves 16 bytes together
      const uint32_t row = start + i / 8 * stride + i % 8 * 128;
      uint16_t bits[kProductK];
      for (int k = 0; k < kProductK; k += kChunk) {
        std::memcpy(bits + k, shared + emulator::Swizzled(row + k * 2), kChunk * 2);
      }
      for (int k = 0; k < kProductK; ++k) elements[k] = __uint_as_float(uint32_t{bits[k]} << 16);
      return;
    }
    const uint32_t column = start + i / 64 * leading + i % 64 * 2;
#pragma GCC unroll 16
    for (int k = 0; k < kProductK; ++k) {
      uint16_t bits;
      const uint32_t address = column + k / 8 * stride + k % 8 * 128;
      std::memcpy(&bits, shared + emulator::Swizzled(address), sizeof(bits));
      elements[k] = __uint_as_float(uint32_t{bits} << 16);
    }
  }
  // Likewise of codes, which are K-major.
  void Read(int i, float (&elements)[kCodesK]) const {
    constexpr int kChunk = 16;
    const uint32_t row = start + i / 8 * stride + i % 8 * 128;
    for (int k = 0; k < kCodesK; k += kChunk) {
      const uint8_t* codes = emulator::self->block->shared + emulator::Swizzled(row + k);
      for (int j = 0; j < kChunk; ++j) elements[k + j] = FromE4m3(codes[j]);
    }
  }
};

// The thread's elements of a product: of each 8 columns two, in two rows, next to each other in d.
template <int kK>
void MultiplyOf(const emulator::Product& p) {
  using Elements = float __attribute__((vector_size(16)));
  const int thread = emulator::self->thread % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  const int column = thread % 4 * 2;
  const Operand operand_a(p.a, p.major_a), operand_b(p.b, p.major_b);
  float a[2][kK], b[2][kK];
  for (int r = 0; r < 2; ++r) operand_a.Read(row + 8 * r, a[r]);
  for (int j = 0; j < p.columns / 8; ++j) {
    for (int c = 0; c < 2; ++c) operand_b.Read(8 * j + column + c, b[c]);
    Elements sums = {};
    for (int k = 0; k < kK; ++k) {
      sums += Elements{a[0][k], a[0][k], a[1][k], a[1][k]} *
              Elements{b[0][k], b[1][k], b[0][k], b[1][k]};
    }
    if (p.accumulate) {
      Elements d;
      std::memcpy(&d, p.d + 4 * j, sizeof(d));
      sums = d + sums;
    }
    std::memcpy(p.d + 4 * j, &sums, sizeof(sums));
  }
}
inline void Multiply(const emulator::Product& p) {
  p.is_of_codes ? MultiplyOf<kCodesK>(p) : MultiplyOf<kProductK>(p);
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
                                           static_cast<int>(kMajorB), accumulate, false});
}
inline void WgmmaE4m3(uint64_t a, uint64_t b, float (&d)[64], bool accumulate) {
  constexpr int kMajor = static_cast<int>(Major::kK);
  emulator::self->open_products.push_back({a, b, d, 128, kMajor, kMajor, accumulate, true});
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
inline void StoreShared(uint32_t address, uint16_t v) {
  if (address % 2 != 0) emulator::Fail("2 bytes lie at a multiple of 2");
  std::memcpy(emulator::SharedAt(emulator::self->block, address), &v, sizeof(v));
}
inline void StoreShared(uint32_t address, float v0, float v1) {
  if (address % 8 != 0) emulator::Fail("8 bytes lie at a multiple of 8");
  const float v[] = {v0, v1};
  std::memcpy(emulator::SharedAt(emulator::self->block, address), v, sizeof(v));
}

}  // namespace megamoe::ptx
