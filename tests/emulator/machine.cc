#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <numeric>

namespace emulator {

Fiber* self;
int num_blocks;
int64_t num_rounds = 0;

namespace {

constexpr size_t kStackBytes = 64 << 10;
constexpr size_t kCacheLineBytes = 64;
constexpr size_t kPageBytes = 4096;
// A round gives each warp one turn, on average. No test needs nearly so many.
constexpr int64_t kMaxRounds = 300'000;

std::mt19937 random_bits;
std::vector<std::function<void()>> pending;
std::vector<std::function<void()>> kernel_bodies;  // by device
void* scheduler_stack_pointer;
int64_t num_warp_turns = 0;

uint32_t Below(size_t end) { return random_bits() % end; }

// Saves the caller's registers and stack pointer and takes up those of another stack.
extern "C" void SwitchStack(void** save, void* load);
asm(R"(
.text
.globl SwitchStack
SwitchStack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

void FiberMain() {
  kernel_bodies[self->block->device]();
  self->ended = true;
  for (;;) Yield();
}

std::vector<char*> free_stacks;

char* TakeStack() {
  if (!free_stacks.empty()) {
    char* stack = free_stacks.back();
    free_stacks.pop_back();
    return stack;
  }
  // Stacks at equal distances would all have their ends, which every switch touches, in the same
  // sets of the caches: they begin at other pages and at other lines of a page.
  static size_t num_stacks = 0;
  const size_t line = num_stacks++ % (kPageBytes / kCacheLineBytes);
  void* memory = mmap(nullptr, kStackBytes + kPageBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) Fail("no memory for stacks");
  return static_cast<char*>(memory) + line * kCacheLineBytes;
}

std::unique_ptr<Fiber> MakeFiber(Block* block, int thread) {
  auto fiber = std::make_unique<Fiber>();
  fiber->thread = thread;
  fiber->block = block;
  fiber->warp = &block->warps[thread / kWarpThreads];
  fiber->stack = TakeStack();
  // What SwitchStack pops: six registers and the address to go to; as after a call, 8 below a
  // multiple of 16.
  void** top = reinterpret_cast<void**>(fiber->stack + kStackBytes - 64);
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(FiberMain);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber->stack_pointer = top;
  return fiber;
}

struct Grid {
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Meeting>> clusters;
  std::vector<std::unique_ptr<Fiber>> fibers;

  // The blocks [first, first + count) of a kernel on a device.
  Grid(int device, int first, int count, int threads) {
    for (int i = 0; i < count; ++i) {
      if (i % kClusterBlocks == 0) clusters.push_back(std::make_unique<Meeting>());
      auto block = std::make_unique<Block>();
      block->device = device;
      block->index = first + i;
      block->rank = i % kClusterBlocks;
      block->cluster = clusters.back().get();
      block->warps.resize(threads / kWarpThreads);
      block->shared = static_cast<uint8_t*>(std::aligned_alloc(1024, kSharedBytes));
      std::memset(block->shared, 0xff, kSharedBytes);
      blocks.push_back(std::move(block));
    }
    for (int i = 0; i < count; ++i) {
      for (int rank = 0; rank < kClusterBlocks; ++rank) {
        const int other = i - blocks[i]->rank + rank;
        blocks[i]->of_cluster[rank] = other < count ? blocks[other].get() : nullptr;
      }
      for (int t = 0; t < threads; ++t) fibers.push_back(MakeFiber(blocks[i].get(), t));
    }
  }
  ~Grid() {
    for (auto& block : blocks) std::free(block->shared);
    for (auto& fiber : fibers) free_stacks.push_back(fiber->stack);
  }
  Grid(const Grid&) = delete;
  Grid& operator=(const Grid&) = delete;
};

// Gives every thread of a warp a turn; returns how many ended.
int RunWarp(Grid& grid, size_t warp) {
  int ended = 0;
  ++num_warp_turns;
  for (int lane = 0; lane < kWarpThreads; ++lane) {
    self = grid.fibers[warp * kWarpThreads + lane].get();
    if (self->ended || (self->has_come != nullptr && !self->has_come(self->awaited))) continue;
    SwitchStack(&scheduler_stack_pointer, self->stack_pointer);
    ended += self->ended;
  }
  return ended;
}

void RunSomePending() {
  for (uint32_t left = Below(pending.size() / 2 + 2); left > 0 && !pending.empty(); --left) {
    std::swap(pending[Below(pending.size())], pending.back());
    const std::function<void()> work = std::move(pending.back());
    pending.pop_back();
    work();
  }
}

template <typename F>
void ForEachElement(const TensorMap& map, const Coordinates& from, uint32_t address, F f) {
  uint32_t offset = 0;
  for (int z = 0; z < map.box[2]; ++z) {
    for (int y = 0; y < map.box[1]; ++y) {
      for (int x = 0; x < map.box[0]; ++x, offset += map.element_bytes) {
        const int64_t at[3] = {from.at[0] + x, from.at[1] + y, from.at[2] + z};
        bool is_inside = true;
        for (int i = 0; i < 3; ++i) is_inside &= at[i] >= 0 && at[i] < map.dims[i];
        int64_t place = at[0] * map.element_bytes;
        for (int i = 1; i < 3; ++i) place += at[i] * map.strides_bytes[i];
        f(Swizzled(address + offset) - address, is_inside ? map.data + place : nullptr);
      }
    }
  }
}

}  // namespace

void Fail(const char* why) {
  std::fprintf(stderr, "emulator: %s\n", why);
  std::exit(3);
}

void Seed(uint32_t seed) { random_bits.seed(seed); }

void Yield() { SwitchStack(&self->stack_pointer, scheduler_stack_pointer); }

void Later(std::function<void()> work) { pending.push_back(std::move(work)); }

const uint32_t* Gather(int operation, uint32_t value) {
  Warp& warp = *self->warp;
  if (warp.lanes.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) Fail("the lanes of a warp do different things together");
  warp.in[self->thread % kWarpThreads] = value;
  if (warp.lanes.arrived + 1 == kWarpThreads) std::memcpy(warp.out, warp.in, sizeof(warp.in));
  Meet(warp.lanes, kWarpThreads);
  // Stays until the next turn, for which this lane must have come again.
  return warp.out;
}

void Meet(Meeting& meeting, int threads) {
  const uint64_t turn = meeting.turn;
  if (++meeting.arrived == threads) {
    meeting.arrived = 0;
    ++meeting.turn;
    meeting.turned_at = num_warp_turns;
  }
  WaitUntil(
      [turn, &meeting] { return meeting.turn != turn && meeting.turned_at != num_warp_turns; });
}

// A device and the kernel that runs on it.
struct Device {
  int index;
  std::deque<Work> stream;
  std::unique_ptr<Grid> grid;
  std::vector<int> asleep;
  size_t running = 0;  // threads
  uint32_t pace = 1;   // it gets one turn in so many

  size_t num_warps() const { return asleep.size(); }

  // Takes up what comes next until that is a kernel.
  void Advance() {
    grid.reset();
    while (!stream.empty() && grid == nullptr) {
      const Work work = std::move(stream.front());
      stream.pop_front();
      if (work.blocks == 0) {
        work.run();
        continue;
      }
      num_blocks = work.blocks;
      kernel_bodies[index] = work.run;
      grid = std::make_unique<Grid>(index, 0, work.blocks, kBlockThreads);
      running = grid->fibers.size();
      asleep.assign(running / kWarpThreads, 0);
    }
  }

  void RunRound() {
    for (size_t i = 0; i < num_warps(); ++i) {
      const size_t warp = Below(num_warps());
      if (asleep[warp] > 0) {
        --asleep[warp];
        continue;
      }
      if (Below(512) == 0) asleep[warp] = Below(200);
      running -= RunWarp(*grid, warp);
    }
  }
};

void RunStreams(const std::vector<std::deque<Work>>& of_devices) {
  std::vector<Device> devices(of_devices.size());
  kernel_bodies.resize(of_devices.size());
  for (size_t i = 0; i < devices.size(); ++i) {
    devices[i].index = static_cast<int>(i);
    devices[i].stream = of_devices[i];
    devices[i].Advance();
  }
  const bool is_alone = devices.size() == 1;
  for (size_t ended = 0; ended < devices.size();) {
    ended = 0;
    if (++num_rounds == kMaxRounds) Fail("the kernels do not end");
    for (Device& device : devices) {
      if (device.grid == nullptr) {
        ++ended;
        continue;
      }
      if (!is_alone && Below(256) == 0) device.pace = Below(4) == 0 ? 40 : 1;
      if (Below(device.pace) != 0) continue;
      device.RunRound();
      if (device.running > 0) continue;
      // Copies that are under way belong to some kernel that runs.
      if (is_alone && !pending.empty()) Fail("the kernel ended before its copies");
      while (!is_alone && !pending.empty()) RunSomePending();
      device.Advance();
    }
    RunSomePending();
  }
}

void LaunchOneByOne(int blocks, int threads, const std::function<void()>& body) {
  num_blocks = blocks;
  kernel_bodies = {body};
  std::vector<int> order(blocks);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_bits);
  std::vector<int> warps(threads / kWarpThreads);
  std::iota(warps.begin(), warps.end(), 0);
  for (const int block : order) {
    Grid grid(0, block, 1, threads);
    int running = threads;
    // Warps that get ahead of each other cost turns in which others only wait: in some blocks.
    const bool is_uneven = Below(8) == 0;
    for (int64_t round = 0; running > 0; ++round) {
      if (round == kMaxRounds) Fail("the kernel does not end");
      std::shuffle(warps.begin(), warps.end(), random_bits);
      for (const int warp : warps) {
        if (!is_uneven || Below(2) == 0) running -= RunWarp(grid, warp);
      }
    }
  }
}

void LoadBox(const TensorMap& map, const Coordinates& from, Block* block, uint32_t address) {
  ForEachElement(map, from, address, [&](uint32_t offset, const uint8_t* element) {
    uint8_t* to = SharedAt(block, address + offset);
    if (element == nullptr) {
      std::memset(to, 0, map.element_bytes);
    } else {
      std::memcpy(to, element, map.element_bytes);
    }
  });
}

void StoreBox(const TensorMap& map, const Coordinates& to, const std::vector<uint8_t>& box) {
  ForEachElement(map, to, 0, [&](uint32_t offset, uint8_t* element) {
    if (element != nullptr) std::memcpy(element, box.data() + offset, map.element_bytes);
  });
}

void AddBox(const TensorMap& map, const Coordinates& to, const std::vector<uint8_t>& box) {
  ForEachElement(map, to, 0, [&](uint32_t offset, uint8_t* element) {
    if (element == nullptr) return;
    float sum, added;
    std::memcpy(&sum, element, sizeof(sum));
    std::memcpy(&added, box.data() + offset, sizeof(added));
    sum += added;
    std::memcpy(element, &sum, sizeof(sum));
  });
}

}  // namespace emulator
