// Multiply: the products of a tile and the arithmetic that finishes it.
//
// reads      stages in shared memory, by products; with biases also by loads
// writes     the finished tile, in chunks of 64 rows x 128 bytes, to the staging buffers
// waits on   item_full, stage_full; staging_empty, which the store warp releases
// signals    item_empty, stage_empty, staging_full, gate_up_made
// threads    two warpgroups, 64 rows of the tile each
#pragma once

#include "comm/trace.cuh"
#include "pipeline/code_products.cuh"
#include "pipeline/delay.cuh"
#include "pipeline/mutation.cuh"
#include "pipeline/products.cuh"
#include "pipeline/queue.cuh"
#include "pipeline/shared_memory.cuh"
#include "pipeline/staging.cuh"
#include "ptx/math.cuh"
#include "ptx/wgmma.cuh"

namespace megamoe {

template <typename Steps>
class MultiplyRole {
  using Params = typename Steps::Params;

 public:
  __device__ MultiplyRole(SharedMemory& shared, const Params& params, int consumer)
      : shared_(shared), p_(params), consumer_(consumer), staging_(shared, consumer) {}

  __device__ void Run() {
    if constexpr (Steps::kKeepsAccumulators) Clear(acc_);
    ForEachItem(shared_, [&](const TileItem& item, auto& slot) {
      Steps::With(item.step, [&]<typename Step>() {
        Delay(DelaySite::kMultiply, item.row * 64 + item.n);
        if constexpr (Step::kIsOfCodes) {
          DoCodes<Step>(item, slot);
        } else {
          Do<Step>(item);
        }
      });
    });
  }

 private:
  static constexpr int kStepK = 16;  // k of an instruction

  // Beside products.
  struct Nothing {
    template <typename... Args>
    __device__ __forceinline__ void operator()(Args...) const {}
  };

  __device__ __forceinline__ bool IsThread0() const { return threadIdx.x % kGroupThreads == 0; }

  template <typename Step>
  __device__ __forceinline__ void Do(const TileItem& item) {
    const bool is_recorder = consumer_ == 0 && item.num_consumers > 0 && IsThread0();
    const TraceScope trace(p_.trace, Step::kPart, is_recorder);
    if (consumer_ >= item.num_consumers) {
      SkipItem<Step>(item);
    } else if constexpr (Step::kHasFinish) {
      MultiplyAndFinish<Step>(typename Step::Before(), item);
    } else if constexpr (Steps::kKeepsAccumulators) {
      MultiplyAndPut<Step>(typename Step::Products(), acc_, item);
    } else {
      float acc[128];
      Clear(acc);
      MultiplyAndPut<Step>(typename Step::Products(), acc, item);
    }
  }

  // What no instruction has written stays alive across all items: a product seems to add to it.
  static __device__ __forceinline__ void Clear(float (&acc)[128]) {
#pragma unroll
    for (float& sum : acc) sum = 0;
  }

  __device__ __forceinline__ void ReleaseStage(uint32_t stage) {
    megamoe::ReleaseStage(ptx::SharedAddress(&shared_), stage);
  }

  // The consumer's half of the tile is all pads.
  template <typename Step>
  __device__ __forceinline__ void SkipItem(const TileItem& item) {
    if constexpr (Step::kMakesGateUp) SayMade();
    Skip<Step>(item);
    if (item.num_consumers > 0) Step::KeepPads(p_, item, consumer_);
  }

  // Only the stages are handed back.
  template <typename Step>
  __device__ __forceinline__ void Skip(const TileItem& item) {
    const int num_k_blocks = Step::Products::NumKBlocks(p_, item);
    if constexpr (Step::kReadsStages && !Step::kHasFinish) {
      auto begun = Step::Begin(p_, item, consumer_);
#pragma unroll 1
      for (int k = 0; k < num_k_blocks; ++k) {
        const uint32_t stage = WaitForStage();
        ReadStage<Step>(begun, item, k, stage);
        ReleaseStage(stage);
      }
      Step::EndStages(p_, item, consumer_, begun);
    } else {
#pragma unroll 1
      for (int k = 0; k < num_k_blocks; ++k) ReleaseStage(WaitForStage());
    }
  }

  // What overwrites a stage are copies: no lane's loads may come behind its release. The fence
  // waits for all loads: those for the next stage come behind it, and those for the first stage
  // when it is full, since nothing before that says that what they read is there.
  template <typename Step, typename Begun>
  __device__ __forceinline__ void ReadStage(Begun& begun, const TileItem& item, int k,
                                            uint32_t stage) {
    if constexpr (Step::kReadsStages) {
      if (!begun.reads()) return;
      if (k == 0) Step::LoadForStage(p_, item, k, begun);
      Step::ReadStage(consumer_, AddressOf(shared_.stages, stage), begun);
      ptx::FenceAsyncShared();
      __syncwarp();
      Step::LoadForStage(p_, item, k + 1, begun);
    }
  }

  // A step with one product, whose sums it rounds and stores.
  template <typename Step, typename Product>
  __device__ __forceinline__ void MultiplyAndPut(ProductList<Product>, float (&acc)[128],
                                                 const TileItem& item) {
    const auto begun = MultiplyBeside<Step, Product>(acc, item);
    Put<Step>(acc, item, begun);
  }

  template <typename Step, typename Begun>
  __device__ __forceinline__ void Put(float (&acc)[128], const TileItem& item, const Begun& begun) {
    Step::Keep(p_, item, consumer_, begun, acc);
#pragma unroll
    for (int chunk = 0; chunk < Step::kOutChunks; ++chunk) {
      staging_.Open(chunk);
#pragma unroll
      for (int c = 0; c < 4; ++c) Step::PutColumns(p_, begun, staging_, acc, chunk, c);
      staging_.Close(chunk);
    }
  }

  // An item of a step with products of FP8 codes. The step begins, too, when those are done.
  template <typename Step>
  __device__ __forceinline__ void DoCodes(const TileItem& item, RingPosition<kItemSlots>& slot) {
    if (consumer_ >= item.num_consumers) {
      SkipItem<Step>(item);
      return;
    }
    const uint32_t now = p_.trace.records != nullptr ? TraceScope::Now() | 1 : 0;  // 0: no trace
    const HeldItem held(item, now, staging_.turns(), slot.state());
    if constexpr (Step::kHasFinish) {
      MultiplyCodesAndFinish<Step>(typename Step::Before(), held);
    } else {
      MultiplyCodesAndPut<Step>(typename Step::Products(), held);
    }
    slot.set_state(held.slot());
    const uint32_t start_ns = held.start_ns();
    if (start_ns == 0) return;
    if (consumer_ == 0 && IsThread0()) TraceScope::Record(p_.trace, Step::kPart, start_ns);
  }
  template <typename Step, typename Product>
  __device__ __forceinline__ void MultiplyCodesAndPut(ProductList<Product>, const HeldItem& held) {
    float acc[128];
    const TileItem item = MultiplyCodes<Product>(acc, held);
    staging_.set_turns(held.turns());
    Put<Step>(acc, item, Step::Begin(p_, item, consumer_));
  }
  template <typename Step, typename... Before>
  __device__ __forceinline__ void MultiplyCodesAndFinish(ProductList<Before...>,
                                                         const HeldItem& held) {
    using Result = typename Step::Result;
    (MultiplyCodesAndKeep<Step, Before>(held), ...);
    auto of_lane = Step::BeginLane(p_, held.item(), consumer_);
    float acc[128];
    const TileItem item = MultiplyCodes<Result>(acc, held, [&](int k) {
      if (k != min(kReadMoreAt, Result::KBlocks(p_) - 1)) return;
      of_lane.ReadMore(p_);
      if constexpr (Step::kMakesGateUp) SayMade();
    });
    staging_.set_turns(held.turns());
    const auto rows = of_lane.OfThread(item, consumer_);
    Step::Finish(p_, item, consumer_, rows, acc, staging_, Stages(*this));
  }
  template <typename Step, typename Product>
  __device__ __forceinline__ void MultiplyCodesAndKeep(const HeldItem& held) {
    if (Product::NumKBlocks(p_, held.item()) == 0) return;
    float acc[128];
    const TileItem item = MultiplyCodes<Product>(acc, held);
    Step::Keep(Product(), p_, item, consumer_, Step::BeginBefore(Product(), p_, item), acc);
  }
  // Returns the item.
  template <typename Product, typename F = Nothing>
  __device__ __forceinline__ TileItem MultiplyCodes(float (&acc)[128], const HeldItem& held,
                                                    F meanwhile = {}) {
    Clear(acc);
    CodeProducts<Product, Params>(shared_, p_, held).AddTo(acc, stage_, meanwhile);
    return held.item();
  }

  // Returns what Begin does, which perhaps has read all stages.
  template <typename Step, typename Product>
  __device__ __forceinline__ auto MultiplyBeside(float (&acc)[128], const TileItem& item) {
    if constexpr (Step::kReadsStages) {
      auto begun = Step::Begin(p_, item, consumer_);
      Multiply<Product>(acc, item,
                        [&](int k, uint32_t stage) { ReadStage<Step>(begun, item, k, stage); });
      Step::EndStages(p_, item, consumer_, begun);
      return begun;
    } else {
      const auto begun = Step::Begin(p_, item, consumer_);
      Multiply<Product>(acc, item);
      return begun;
    }
  }

  // A step that finishes its result with what products before it have left, or another kernel.
  template <typename Step, typename... Before>
  __device__ __forceinline__ void MultiplyAndFinish(ProductList<Before...>, const TileItem& item) {
    using Result = typename Step::Result;
    auto begun = Step::Begin(p_, item, consumer_);
    (MultiplyAndKeep<Step, Before>(item), ...);
    float acc[128];
    Clear(acc);
    const int read_more_at = min(kReadMoreAt, Result::NumKBlocks(p_, item) - 1);
    Multiply<Result>(acc, item, [&](int k, uint32_t stage) {
      ReadStage<Step>(begun, item, k, stage);
      if (k != read_more_at) return;
      begun.ReadMore(p_);
      if constexpr (Step::kMakesGateUp) SayMade();
    });
    if constexpr (Step::kReadsStages) Step::EndStages(p_, item, consumer_, begun);
    Step::Finish(p_, item, consumer_, begun, acc, staging_, Stages(*this));
  }
  static constexpr int kReadMoreAt = 2;  // K-blocks, by which what Begin reads has come

  template <typename Step, typename Product>
  __device__ __forceinline__ void MultiplyAndKeep(const TileItem& item) {
    if (Product::NumKBlocks(p_, item) == 0) return;
    auto begun = Step::BeginBefore(Product(), p_, item);
    float acc[128];
    Clear(acc);
    Multiply<Product>(acc, item);
    Step::Keep(Product(), p_, item, consumer_, begun, acc);
  }

  // What this warp has kept may be copied.
  __device__ __forceinline__ void SayMade() {
    ptx::FenceAsyncGlobal();
    __syncwarp();
    if (ptx::ElectOne()) ptx::BarrierArrive(AddressOf(shared_.gate_up_made, 0));
  }

  // The stages that a finish reads, by loads: it calls Release behind an asynchronous fence, since
  // what overwrites them are copies.
  class Stages {
   public:
    __device__ __forceinline__ explicit Stages(MultiplyRole& role) : role_(role) {}
    __device__ __forceinline__ uint32_t Next() {
      stage_ = role_.WaitForStage();
      return AddressOf(role_.shared_.stages, stage_);
    }
    __device__ __forceinline__ void Release() {
      __syncwarp();
      role_.ReleaseStage(stage_);
    }

   private:
    MultiplyRole& role_;
    uint32_t stage_ = 0;
  };

  // Calls meanwhile(k, stage) when the products of K-block k have been issued.
  template <typename Product, typename F = Nothing>
  __device__ __forceinline__ void Multiply(float (&acc)[128], const TileItem& item,
                                           F meanwhile = {}) {
    static_assert(2 * 128 == Product::kColumns);
    constexpr auto kA = Product::kMajorA;
    constexpr auto kB = Product::kMajorB;
    const auto multiply = [&](uint32_t stage, int i, bool accumulate) {
      if constexpr (Product::kIsOfRows) {
        if (HasFault(SeededFault::kSumsInBf16) && i == 0) RoundToBf16(acc);
      }
      const uint64_t a = ptx::TileDescriptor<kA>(stage + consumer_ * ptx::kChunkBytes);
      const uint64_t b = ptx::TileDescriptor<kB>(stage + kStageABytes);
      ptx::Wgmma<kA, kB>(a + i * ptx::kDescriptor16K<kA>, b + i * ptx::kDescriptor16K<kB>, acc,
                         accumulate);
    };
    const auto multiply_block = [&](uint32_t stage, int k) {
#pragma unroll
      for (int i = 0; i < kBlockK / kStepK; ++i) multiply(stage, i, (k | i) != 0);
    };
    const int num_k_blocks = Product::NumKBlocks(p_, item);
    if constexpr (!Product::kIsOfRows) {
      EndProducts(acc, ForEachStage(acc, num_k_blocks, multiply_block, meanwhile));
    } else if (num_k_blocks > 0) {  // nothing to add leaves 0
      // Of the last block only as much as there are rows.
      const int num_whole = num_k_blocks - 1;
      const uint32_t previous = ForEachStage(acc, num_whole, multiply_block, meanwhile);
      const uint32_t last = WaitForStage();
      const bool has_pads = HasFault(SeededFault::kBlockOfPads);
      const int num_rows = has_pads ? num_k_blocks * kBlockK : item.depth;
      const int num_steps = (num_rows - num_whole * kBlockK + kStepK - 1) / kStepK;
#pragma unroll 1
      for (int i = 0; i < num_steps; ++i) {
        IssueProducts(
            acc, [&] { multiply(AddressOf(shared_.stages, last), i, (num_whole | i) != 0); },
            [&] {
              if (i == 0) meanwhile(num_whole, last);
            });
        if (i == 0 && num_whole > 0) ReleaseStage(previous);
      }
      EndProducts(acc, last);
    }
  }

  // What has been summed so far.
  static __device__ __forceinline__ void RoundToBf16(float (&acc)[128]) {
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(acc);
#pragma unroll
    for (int i = 0; i < 128; ++i) acc[i] = ptx::LowBf16(ptx::PackBf16(acc[i], 0));
    ptx::PinRegisters(acc);
    ptx::WgmmaFence();
  }

  // Calls issue(address of the stage, k) for each K-block. The products of one block are on their
  // way while those of the next are issued; those of the last one still are at the end. Returns its
  // stage.
  template <typename F, typename G>
  __device__ __forceinline__ uint32_t ForEachStage(float (&acc)[128], int num_k_blocks, F issue,
                                                   G meanwhile) {
    uint32_t previous = 0;
#pragma unroll 1
    for (int k = 0; k < num_k_blocks; ++k) {
      const uint32_t stage = WaitForStage();
      IssueProducts(
          acc, [&] { issue(AddressOf(shared_.stages, stage), k); }, [&] { meanwhile(k, stage); });
      if (k > 0) ReleaseStage(previous);
      previous = stage;
    }
    return previous;
  }

  // The next stage, when it is full.
  __device__ __forceinline__ uint32_t WaitForStage() {
    const uint32_t stage = stage_.index();
    ptx::BarrierWait(AddressOf(shared_.stage_full, stage), stage_.parity());
    stage_.Advance();
    return stage;
  }

  // Issues products as one group, then calls meanwhile(); all products before the group are then
  // complete in this warp.
  template <typename F, typename G>
  __device__ __forceinline__ void IssueProducts(float (&acc)[128], F issue, G meanwhile) {
    ptx::PinRegisters(acc);
    ptx::WgmmaFence();
    issue();
    ptx::WgmmaCommit();
    ptx::PinRegisters(acc);
    meanwhile();
    ptx::WgmmaWait<1>();
  }

  __device__ __forceinline__ void EndProducts(float (&acc)[128], uint32_t last_stage) {
    ptx::WgmmaWait<0>();
    ptx::PinRegisters(acc);
    ReleaseStage(last_stage);
  }

  SharedMemory& shared_;
  const Params& p_;
  const int consumer_;
  Staging staging_;
  RingPosition<kNumStages> stage_;
  float acc_[128];  // with Steps::kKeepsAccumulators
};

}  // namespace megamoe
