// The calls of tests/ranks/calls.h on an emulated machine, a device for each rank: main IN OUT.
#include <bit>

#include "calls.h"
#include "comm/share_inputs.cuh"
#include "kernel/backward.h"
#include "kernel/backward_fp8.h"
#include "kernel/forward.h"
#include "kernel/forward_fp8.h"
#include "kernel/quantize_rows.cuh"
#include "kernel/quantize_rows.h"
#include "kernels.h"
#include "machine.h"
#include "plan/plan.h"

namespace {

constexpr int kPlanTurns = 30;  // of each of its threads

int num_multiprocessors;
std::vector<std::deque<emulator::Work>> streams;  // of each rank
// Of the call that is enqueued.
int current_rank;
std::vector<ranks::PlanPointers> plan_of_pass;  // what its plan shall hold

// How many kernels the call still runs, behind which nothing of it is enqueued.
constexpr int kAllKernels = -1;
int kernels_left = kAllKernels;

void Enqueue(emulator::Work work) {
  if (kernels_left != 0) streams[current_rank].push_back(std::move(work));
}
void EnqueueKernel(emulator::Work work) {
  Enqueue(std::move(work));
  if (kernels_left > 0) --kernels_left;
}

// What a rank's waits need.
struct WaitState {
  megamoe::FaultPage page;
  uint32_t failed_epoch;
};
std::vector<WaitState> waits;

CUresult Encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* dims, const cuuint64_t* strides_bytes, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulator::TensorMap made = {};
  made.data = static_cast<uint8_t*>(data);
  made.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                       : type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1
                                                               : 2;
  for (unsigned i = 0; i < 3; ++i) {
    made.dims[i] = i < rank ? static_cast<int64_t>(dims[i]) : 1;
    made.box[i] = i < rank ? static_cast<int>(box[i]) : 1;
    if (i == 0 || i >= rank) continue;
    made.strides_bytes[i] = static_cast<int64_t>(strides_bytes[i - 1]);
    if (strides_bytes[i - 1] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  }
  if (made.box[0] * made.element_bytes != 128) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

}  // namespace

// What the host code calls of CUDA.
extern "C" {
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult*) {
  *entry = reinterpret_cast<void*>(Encode);
  return cudaSuccess;
}
// Calls say how many multiprocessors they count on.
cudaError_t cudaGetDevice(int*) { return cudaErrorInvalidDevice; }
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int) { return cudaErrorInvalidDevice; }
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  Enqueue({[=] { std::memset(data, value, bytes); }, 0});
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "an error"; }
const char* cudaGetErrorString(cudaError_t) { return "of the emulated machine"; }
}

namespace megamoe {

// Reads the routes of all ranks as the kernels of the plan do, at about their pace.
void CheckRoutes(const PlanProblem& problem, int pass, const int32_t* expert_idx,
                 const PlanArrays& plan) {
  if (waits[problem.rank].failed_epoch != 0) return;  // who gave up may have none
  const RoutingDims& d = problem.dims;
  const int num_passes = plan.totals[2];
  if (pass >= num_passes) return;
  const int num_threads = emulator::num_blocks * emulator::kBlockThreads;
  const int thread = static_cast<int>(blockIdx.x) * emulator::kBlockThreads + threadIdx.x;
  for (int turn = 0; turn < kPlanTurns; ++turn) {
    emulator::Yield();
    for (int slot = thread; slot < d.R * d.T * d.K; slot += num_threads) {
      const int64_t expert = int64_t{expert_idx[slot]} - problem.rank * d.experts_per_rank();
      const int row = plan.slot_row[slot];
      const int token = slot / d.K % d.T;
      const bool is_local = expert >= 0 && expert < d.experts_per_rank() &&
                            token >= PartStart(d.T, pass, num_passes) &&
                            token < PartStart(d.T, pass + 1, num_passes);
      const bool is_right =
          !is_local ? row < 0
                    : row >= plan.expert_start[expert] && row < plan.expert_start[expert + 1];
      if (!is_right) emulator::Fail("the plan reads routes that are not those of its call");
    }
  }
}

// The plan comes from IN; here it appears, clears the counters and reads what it is made of.
CudaStatus plan::Launch(cudaStream_t, const PlanProblem& problem, int pass,
                        const int32_t* expert_idx, const PlanArrays& arrays, const Cleared& cleared,
                        const WaitContext&) {
  const auto make = [=, from = plan_of_pass[pass], rank = current_rank] {
    if (pass > 0 && waits[rank].failed_epoch != 0) arrays.totals[2] = 0;
    if (pass > 0 && pass >= arrays.totals[2]) return;
    const auto fields = PlanFields(problem);
    const auto to = std::bit_cast<ranks::PlanPointers>(arrays);
    for (int i = 0; i < ranks::kNumPlanArrays; ++i) {
      std::memcpy(to[i], from[i], fields[i].elements * sizeof(int32_t));
    }
    std::memset(cleared.words, 0, cleared.count * sizeof(uint32_t));
  };
  Enqueue({make, 0});
  if (problem.dims.R > 1) {
    Enqueue({[=] { CheckRoutes(problem, pass, expert_idx, arrays); }, num_multiprocessors});
  }
  return {};
}

CudaStatus LaunchShareInputs(cudaStream_t, int blocks, const ShareParams& params) {
  static_assert(kShareThreads == emulator::kBlockThreads);
  streams[current_rank].push_back({[=] { ShareInputs(params); }, blocks});
  return {};
}

CudaStatus LaunchForward(cudaStream_t, int blocks, const ForwardMaps& maps,
                         const ForwardParams& params, bool) {
  const auto run = IsGeneral(params.unit, params.biases) ? emulator::RunForward<GeneralUnit>
                                                         : emulator::RunForward<SwiGlu>;
  EnqueueKernel({[=] { run(maps, params); }, blocks});
  return {};
}

CudaStatus LaunchQuantizeRows(cudaStream_t, int blocks, const QuantizeParams& params, bool) {
  static_assert(kQuantizeThreads == emulator::kBlockThreads);
  Enqueue({[=] { QuantizeRows(params); }, blocks});
  return {};
}

CudaStatus LaunchFp8Forward(cudaStream_t, int blocks, const Fp8ForwardMaps& maps,
                            const Fp8ForwardParams& params, bool) {
  EnqueueKernel({[=] { emulator::RunFp8Forward(maps, params); }, blocks});
  return {};
}

CudaStatus LaunchBackward(cudaStream_t, int blocks, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool) {
  const auto run = IsGeneral(params.unit, params.biases) ? emulator::RunBackward<GeneralUnit>
                                                         : emulator::RunBackward<SwiGlu>;
  EnqueueKernel({[=] { run(maps, params, float_gradients); }, blocks});
  return {};
}

CudaStatus LaunchFp8Backward(cudaStream_t, int blocks, const Fp8BackwardMaps& maps,
                             const Fp8BackwardParams& params, bool float_gradients, bool) {
  EnqueueKernel({[=] { emulator::RunFp8Backward(maps, params, float_gradients); }, blocks});
  return {};
}

}  // namespace megamoe

namespace {

class Emulated final : public ranks::Machine {
 public:
  explicit Emulated(const ranks::Header& header) : h_(header) {
    waits.resize(h_.R);
    for (WaitState& wait : waits) wait.page.ended_ranks = static_cast<uint32_t>(h_.ended_ranks);
    streams.resize(h_.R);
    num_multiprocessors = h_.multiprocessors;
    emulator::Seed(h_.seed);
    megamoe::seeded_fault = h_.fault;
    emulator::SetGeneralFault(h_.fault);
  }

  void* Allocate(int64_t bytes) override {
    void* memory = std::aligned_alloc(1024, (bytes + 1024) / 1024 * 1024);
    std::memset(memory, 0xff, bytes);
    return memory;
  }
  void CopyIn(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, bytes); }
  void CopyOut(void* to, const void* from, int64_t bytes) override { std::memcpy(to, from, bytes); }
  megamoe::WaitContext Begin(int rank, uint32_t epoch,
                             const std::vector<ranks::PlanPointers>& plans) override {
    current_rank = rank;
    plan_of_pass = plans;
    if ((h_.failed_ranks >> rank & 1) != 0) Enqueue({[=] { waits[rank].failed_epoch = epoch; }, 0});
    const uint64_t deadline = h_.deadline == 0 ? ~uint64_t{0} : h_.deadline * emulator::kRoundNs;
    const uint32_t num_tied = h_.R > 1 ? epoch - 1 : 0;
    return {&waits[rank].page, &waits[rank].failed_epoch, deadline, epoch, rank, num_tied};
  }
  cudaStream_t Stream() override { return nullptr; }
  void EnqueueStart(int num_kernels, const std::function<void()>& enqueue) override {
    kernels_left = num_kernels;
    enqueue();
    kernels_left = kAllKernels;
  }
  void Run() override { emulator::RunStreams(streams); }
  uint32_t FailedEpoch(int rank) override {
    const WaitState& wait = waits[rank];
    const bool is_late =
        wait.page.record_epoch != 0 && wait.page.record.cause == megamoe::FaultCause::kDeadline;
    if (is_late && wait.page.long_wait == 0) ranks::Fail("nobody was told of a long wait");
    return wait.failed_epoch;
  }
  const megamoe::FaultRecord& Record(int rank) override { return waits[rank].page.record; }

 private:
  const ranks::Header h_;
};

ranks::Machine& Start(const ranks::Header& header) { return *new Emulated(header); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) ranks::Fail("usage: main IN OUT");
  ranks::RunFile(argv[1], argv[2], Start);
}
