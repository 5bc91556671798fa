// A GPU in one process, as far as the kernels can tell: for tests without one.
//
// Every CUDA thread is a fiber; warps run in random order, and now and then one falls far behind.
// Copies and products are as asynchronous as the hardware allows: a copy reads and writes at random
// later moments, a product reads its operands when it is waited for. So a missing wait shows, if
// not in every run. What does not show: memory ordering, proxies, registers, time.
//
// tests/emulator/ptx replaces cuda/ptx; everything else of the kernels is compiled as it is.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

namespace emulator {

constexpr int kWarpThreads = 32;
constexpr int kBlockThreads = 384;  // of the kernels of cuda/kernel
constexpr int kClusterBlocks = 2;
constexpr uint32_t kSharedBytes = 232448;

// Threads that wait for each other. Those of a warp go on together, as a barrier's do: not before
// the warp gets its next turn.
struct Meeting {
  int arrived = 0;
  uint64_t turn = 0;
  int64_t turned_at = 0;  // a turn of a warp
};

// What the lanes of a warp do together.
struct Warp {
  Meeting lanes;
  int operation = 0;
  uint32_t in[kWarpThreads], out[kWarpThreads];
};

struct Block {
  int device, index, rank;  // index: on the device
  uint8_t* shared;
  Block* of_cluster[kClusterBlocks];
  Meeting* cluster;
  Meeting threads;
  std::vector<Warp> warps;

  int num_threads() const { return static_cast<int>(warps.size()) * kWarpThreads; }
};

// A matrix product that has been issued: this thread's share of it is done when it is waited for.
struct Product {
  uint64_t a, b;  // descriptors
  float* d;
  int columns;
  int major_a, major_b;
  bool accumulate;
  bool is_of_codes;  // e4m3, else bf16
};

struct Store {
  bool is_read = false, is_written = false;
};
using StoreGroup = std::vector<std::shared_ptr<Store>>;

struct Fiber {
  // What it waits for, a function of `awaited`; null: nothing.
  bool (*has_come)(const void* awaited) = nullptr;
  alignas(void*) uint8_t awaited[32];
  void* stack_pointer;
  char* stack;
  bool ended = false;
  int thread;  // of its block
  Block* block;
  Warp* warp;
  std::vector<Product> open_products;
  std::deque<std::vector<Product>> product_groups;
  StoreGroup open_stores;
  std::deque<StoreGroup> store_groups;
};

extern Fiber* self;
extern int num_blocks;
extern int64_t num_rounds;  // that RunStreams has made
constexpr uint64_t kRoundNs =
    10'000;  // what a timer shows of one: a GPU makes no fewer polls in it

// Lets others run.
void Yield();
// Lets others run until has_come(). It is asked at each turn without a switch to this thread's
// stack, so what it needs is copied.
template <typename HasCome>
void WaitUntil(const HasCome& has_come) {
  static_assert(std::is_trivially_copyable_v<HasCome> && sizeof(has_come) <= sizeof(self->awaited));
  if (has_come()) return;
  std::memcpy(self->awaited, &has_come, sizeof(has_come));
  self->has_come = [](const void* awaited) { return (*static_cast<const HasCome*>(awaited))(); };
  Yield();
  self->has_come = nullptr;
}
// Runs `work` at a random later moment.
void Later(std::function<void()> work);
// What a device has to do: a kernel, in every thread of so many blocks, or, of 0 blocks, something
// else than a kernel.
struct Work {
  std::function<void()> run;
  int blocks;
};
// Runs the work of each device in its order, those of different devices beside each other, now one
// ahead and now the other.
void RunStreams(const std::vector<std::deque<Work>>& of_devices);
// Likewise, of a kernel whose blocks need nothing of each other: one by one, in random order.
void LaunchOneByOne(int blocks, int threads, const std::function<void()>& body);
// Waits until so many threads have come to the meeting.
void Meet(Meeting& meeting, int threads);
// The seed of all that is random.
void Seed(uint32_t seed);
[[noreturn]] void Fail(const char* why);

// Waits for all lanes of the warp, which call with the same operation; returns their values.
const uint32_t* Gather(int operation, uint32_t value);

// The 8 bytes of an mbarrier.
struct Barrier {
  uint8_t phase, arrivals;
  int16_t pending;
  int32_t bytes;

  void Arrive() {
    if (--pending < 0) Fail("more arrivals on a barrier than it counts");
    Turn();
  }
  void Complete(int32_t arrived_bytes) {
    bytes -= arrived_bytes;
    Turn();
  }

 private:
  void Turn() {
    if (pending != 0 || bytes != 0) return;
    phase ^= 1;
    pending = arrivals;
  }
};
static_assert(sizeof(Barrier) == sizeof(uint64_t));

inline uint8_t* SharedAt(const Block* block, uint32_t address) { return block->shared + address; }
inline Barrier* BarrierAt(const Block* block, uint32_t address) {
  return reinterpret_cast<Barrier*>(SharedAt(block, address));
}
// Where the 128-byte swizzle puts what belongs at `address`.
inline uint32_t Swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// What a CUtensorMap holds here; at most three dimensions, the first one contiguous.
struct TensorMap {
  uint8_t* data;
  int64_t dims[3];
  int64_t strides_bytes[3];
  int box[3];
  int element_bytes;

  int box_bytes() const { return box[0] * box[1] * box[2] * element_bytes; }
};
static_assert(sizeof(TensorMap) <= 128);

struct Coordinates {
  int64_t at[3];
};
// Copies a box into shared memory at `address`; what lies outside the tensor is 0.
void LoadBox(const TensorMap& map, const Coordinates& from, Block* block, uint32_t address);
// Copies a box, as shared memory holds it, to where it lies inside the tensor.
void StoreBox(const TensorMap& map, const Coordinates& to, const std::vector<uint8_t>& box);
// Adds one of float32 to what lies there.
void AddBox(const TensorMap& map, const Coordinates& to, const std::vector<uint8_t>& box);

}  // namespace emulator

// ---- the words of CUDA C++ that the kernels use ----

struct ThreadX {
  operator unsigned() const { return static_cast<unsigned>(emulator::self->thread); }
};
struct BlockX {
  operator unsigned() const { return static_cast<unsigned>(emulator::self->block->index); }
};
struct GridX {
  operator unsigned() const { return static_cast<unsigned>(emulator::num_blocks); }
};
template <typename X>
struct Index {
  X x;
};
inline constexpr Index<ThreadX> threadIdx;
inline constexpr Index<BlockX> blockIdx;
inline constexpr Index<GridX> gridDim;

inline float __uint_as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float value) { return __builtin_bit_cast(int, value); }
inline uint32_t __float_as_uint(float value) { return __builtin_bit_cast(uint32_t, value); }
// Of two halves of 16 bits each.
inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xffff, b & 0xffff);
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return __builtin_ffs(static_cast<int>(v)); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
inline void __nanosleep(unsigned) { emulator::Yield(); }

inline void __syncthreads() {
  emulator::Block* block = emulator::self->block;
  emulator::Meet(block->threads, block->num_threads());
}
inline void __syncwarp() { emulator::Gather(0, 0); }
template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  return __builtin_bit_cast(T, emulator::Gather(1, __builtin_bit_cast(uint32_t, value))[lane]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = emulator::self->thread % emulator::kWarpThreads ^ mask;
  return __builtin_bit_cast(T, emulator::Gather(2, __builtin_bit_cast(uint32_t, value))[lane]);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  const int lane = emulator::self->thread % emulator::kWarpThreads;
  const uint32_t* all = emulator::Gather(4, __builtin_bit_cast(uint32_t, value));
  return __builtin_bit_cast(T, all[lane < distance ? lane : lane - distance]);
}
template <typename T>
unsigned __match_any_sync(unsigned, T value) {
  const uint32_t own = __builtin_bit_cast(uint32_t, value);
  const uint32_t* all = emulator::Gather(5, own);
  unsigned same = 0;
  for (int lane = 0; lane < emulator::kWarpThreads; ++lane) same |= (all[lane] == own) << lane;
  return same;
}
inline unsigned __ballot_sync(unsigned, bool is_set) {
  const uint32_t* all = emulator::Gather(3, is_set);
  unsigned ballot = 0;
  for (int lane = 0; lane < emulator::kWarpThreads; ++lane) ballot |= (all[lane] & 1) << lane;
  return ballot;
}
inline bool __all_sync(unsigned mask, bool is_set) { return __ballot_sync(mask, is_set) == ~0u; }
inline bool __any_sync(unsigned mask, bool is_set) { return __ballot_sync(mask, is_set) != 0; }

template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* word, std::type_identity_t<T> value) {
  emulator::Yield();
  const T old = *word;
  *word += value;
  return old;
}
inline uint32_t atomicExch(uint32_t* word, uint32_t value) {
  const uint32_t old = *word;
  *word = value;
  return old;
}
template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? a : b;
}
template <typename A, typename B>
auto max(A a, B b) {
  return a > b ? a : b;
}
