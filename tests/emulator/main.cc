// Runs calls of the forward and of the backward, one after another on each of the emulated devices
// of an expert group: emulator IN OUT.
//
// IN holds the numbers of `Header` and, for each call, those of `CallHeader` and of each rank the
// arrays of its plan in each pass and its operands; OUT gets the results in that order, then of
// each rank the epoch of the last call that has failed. tests/emulated.py writes and reads them.
// All else that a call takes is full of NaN.
#include <array>
#include <bit>
#include <cstdio>

#include "comm/share_inputs.cuh"
#include "host/backward.h"
#include "host/forward.h"
#include "host/peer_arrays.h"
#include "kernel/backward.h"
#include "kernel/backward_steps.cuh"
#include "kernel/forward.h"
#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"
#include "machine.h"
#include "plan/plan.h"

namespace {

struct Header {
  int32_t num_calls, R, T, K, E, H, I, num_blocks, pool_routes;
  int32_t multiprocessors, seed, fault;
  int32_t failed_ranks;     // a bit for each: its waits give up soon, in all calls
  int32_t deadline_rounds;  // of a wait; 0: none
  int32_t peer_bytes;       // as jax_megamoe/memory.py has them
  int32_t bf16_sums;
  int32_t ended_ranks;  // a bit for each: the host says that waits for it are in vain
};

struct CallHeader {
  int32_t is_backward, num_steps, float_gradients, keep_gate_up, num_launches;
  int32_t trace_records;  // rows of the trace, the last result; 0: none
  int32_t tiles_m[megamoe::kMaxSteps], tiles_n[megamoe::kMaxSteps];
  int64_t launches[8];
};

int num_multiprocessors;
constexpr int kNumPlanArrays = megamoe::kNumPlanFields - 1;  // all but the scratch
constexpr int kPlanTurns = 30;                               // of each of its threads

std::vector<std::deque<emulator::Work>> streams;  // of each rank
int current_rank;                                 // whose calls are enqueued

using megamoe::LayerCall;

// The fields of PlanArrays.
using PlanPointers = std::array<void*, megamoe::kNumPlanFields>;
std::vector<PlanPointers> plan_of_pass;  // of the call that is enqueued: what its plan shall hold

void* Allocate(size_t bytes) {
  void* memory = std::aligned_alloc(1024, (bytes + 1024) / 1024 * 1024);
  std::memset(memory, 0xff, bytes);
  return memory;
}

template <typename T>
T* Read(FILE* file, int64_t count) {
  void* data = Allocate(count * sizeof(T));
  const size_t wanted = static_cast<size_t>(count);
  if (std::fread(data, sizeof(T), wanted, file) != wanted) emulator::Fail("IN is too short");
  return static_cast<T*>(data);
}

// The results of a call, in their order.
class Results {
 public:
  void* Add(int64_t bytes) {
    parts_.push_back({Allocate(bytes), static_cast<size_t>(bytes)});
    return parts_.back().data;
  }
  void Write(const char* path) const {
    FILE* file = std::fopen(path, "wb");
    for (const Part& part : parts_) std::fwrite(part.data, 1, part.bytes, file);
    std::fclose(file);
  }

 private:
  struct Part {
    void* data;
    size_t bytes;
  };
  std::vector<Part> parts_;
};

constexpr uint32_t kFirstEpoch = 1;

// What a rank's waits need.
struct WaitState {
  megamoe::FaultPage page;
  uint32_t failed_epoch;
};
std::vector<WaitState> waits;

LayerCall ReadLayer(FILE* file, const Header& h, const CallHeader& c, int rank, uint32_t epoch) {
  LayerCall call = {};
  call.plan.dims = {h.T, h.K, h.E, h.R};
  call.plan.pool_routes = h.pool_routes;
  call.plan.rank = rank;
  call.plan.num_steps = c.num_steps;
  for (int s = 0; s < c.num_steps; ++s) call.plan.steps[s] = {c.tiles_m[s], c.tiles_n[s], 0};
  const auto fields = megamoe::PlanFields(call.plan);
  plan_of_pass.assign(megamoe::MaxPasses(call.plan), {});
  for (PlanPointers& plan : plan_of_pass) {
    for (int i = 0; i < kNumPlanArrays; ++i) plan[i] = Read<int32_t>(file, fields[i].elements);
  }
  PlanPointers arrays = {};
  for (int i = 0; i < kNumPlanArrays; ++i) {
    arrays[i] = Allocate(fields[i].elements * sizeof(int32_t));
  }
  call.plan_arrays = std::bit_cast<megamoe::PlanArrays>(arrays);
  call.H = h.H;
  call.I = h.I;
  call.num_blocks = h.num_blocks;
  call.pool_rows = megamoe::PoolRows(call.plan);
  call.expert_idx = Read<int32_t>(file, h.T * h.K);
  call.expert_weight = Read<float>(file, h.T * h.K);
  call.launches = c.launches;
  call.num_launches = c.num_launches;
  const uint64_t deadline =
      h.deadline_rounds == 0 ? ~uint64_t{0} : h.deadline_rounds * emulator::kRoundNs;
  const uint32_t num_tied = h.R > 1 ? epoch - 1 : 0;
  call.wait = {&waits[rank].page, &waits[rank].failed_epoch, deadline, epoch, rank, num_tied};
  return call;
}

// A call that is traced gets it behind its other results.
megamoe::TraceBuffer Trace(const Header& h, const CallHeader& c, Results* out) {
  if (c.trace_records == 0) return {};
  void* records = out->Add(int64_t{c.trace_records} * sizeof(megamoe::TraceRecord));
  const uint32_t others = h.R > 1 ? 1 + megamoe::kTrafficRecords : 1;
  return {static_cast<megamoe::TraceRecord*>(records), c.trace_records - others};
}

constexpr int64_t kBf16Bytes = 2;

void* ReadBf16(FILE* file, int64_t count) { return Read<uint16_t>(file, count); }
void* Pool(const LayerCall& layer, int64_t columns) {
  return Allocate(layer.pool_rows * columns * kBf16Bytes);
}

megamoe::ForwardCall Forward(FILE* file, const Header& h, const CallHeader& c,
                             const LayerCall& layer, Results* out) {
  megamoe::ForwardCall call = {};
  static_cast<LayerCall&>(call) = layer;
  const int64_t weights = int64_t{h.E} / h.R * h.H * h.I;
  call.x = ReadBf16(file, int64_t{h.T} * h.H);
  call.w_gate = ReadBf16(file, weights);
  call.w_up = ReadBf16(file, weights);
  call.w_down = ReadBf16(file, weights);
  call.y = out->Add(int64_t{h.T} * h.H * kBf16Bytes);
  call.pool = Pool(layer, h.H);
  call.h = Pool(layer, h.I);
  if (c.keep_gate_up != 0) call.gate_up = out->Add(layer.pool_rows * 2 * h.I * kBf16Bytes);
  call.counters = static_cast<uint32_t*>(Allocate(megamoe::NumForwardCounters(call.pool_rows) * 4));
  call.trace = Trace(h, c, out);
  return call;
}

megamoe::BackwardCall Backward(FILE* file, const Header& h, const CallHeader& c,
                               const LayerCall& layer, Results* out) {
  megamoe::BackwardCall call = {};
  static_cast<LayerCall&>(call) = layer;
  const int64_t weights = int64_t{h.E} / h.R * h.H * h.I;
  const int64_t tiles_n = megamoe::NumDgradDownTiles(h.I);
  call.x = ReadBf16(file, int64_t{h.T} * h.H);
  call.w_gate = ReadBf16(file, weights);
  call.w_up = ReadBf16(file, weights);
  call.w_down = ReadBf16(file, weights);
  call.dy = ReadBf16(file, int64_t{h.T} * h.H);
  if (c.keep_gate_up != 0) call.gate_up = ReadBf16(file, layer.pool_rows * 2 * h.I);
  call.dx = out->Add(int64_t{h.T} * h.H * kBf16Bytes);
  call.dw = static_cast<float*>(out->Add(int64_t{h.T} * h.K * sizeof(float)));
  call.float_gradients = c.float_gradients != 0;
  if (c.num_steps == 4) {
    const int64_t bytes = weights * (call.float_gradients ? 4 : 2);
    for (void** gradient : {&call.dw_gate, &call.dw_up, &call.dw_down}) *gradient = out->Add(bytes);
  }
  for (void** pool : {&call.x_pool, &call.dy_pool, &call.dx_pool}) *pool = Pool(layer, h.H);
  for (void** pool : {&call.dg, &call.du, &call.wh}) *pool = Pool(layer, h.I);
  call.dw_partial = static_cast<float*>(Allocate(layer.pool_rows * tiles_n * sizeof(float)));
  const int64_t counters = megamoe::NumBackwardCounters(layer.pool_rows, h.E / h.R);
  call.counters = static_cast<uint32_t*>(Allocate(counters * sizeof(uint32_t)));
  call.trace = Trace(h, c, out);
  return call;
}

CUresult Encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                const cuuint64_t* dims, const cuuint64_t* strides_bytes, const cuuint32_t* box,
                const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  emulator::TensorMap made = {};
  made.data = static_cast<uint8_t*>(data);
  made.element_bytes = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
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
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = num_multiprocessors;
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t) {
  streams[current_rank].push_back({[=] { std::memset(data, value, bytes); }, 0});
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
    const auto to = std::bit_cast<PlanPointers>(arrays);
    for (int i = 0; i < kNumPlanArrays; ++i) {
      std::memcpy(to[i], from[i], fields[i].elements * sizeof(int32_t));
    }
    std::memset(cleared.words, 0, cleared.count * sizeof(uint32_t));
  };
  streams[current_rank].push_back({make, 0});
  if (problem.dims.R > 1) {
    streams[current_rank].push_back(
        {[=] { CheckRoutes(problem, pass, expert_idx, arrays); }, num_multiprocessors});
  }
  return {};
}

// As LaunchForward of cuda/kernel/forward.cu.
template <template <bool, bool> typename Steps, typename Maps, typename Params>
void RunForwardKernel(const Maps& maps, const Params& params) {
  const bool keeps = params.gate_up != nullptr && params.pass == 0;
  if (params.dims.R > 1) {
    keeps ? Skeleton<Steps<true, true>>::Run(maps, params)
          : Skeleton<Steps<false, true>>::Run(maps, params);
  } else {
    keeps ? Skeleton<Steps<true, false>>::Run(maps, params)
          : Skeleton<Steps<false, false>>::Run(maps, params);
  }
}

CudaStatus LaunchShareInputs(cudaStream_t, int blocks, const ShareParams& params) {
  static_assert(kShareThreads == emulator::kBlockThreads);
  streams[current_rank].push_back({[=] { ShareInputs(params); }, blocks});
  return {};
}

CudaStatus LaunchForward(cudaStream_t, int blocks, const ForwardMaps& maps,
                         const ForwardParams& params, bool) {
  streams[current_rank].push_back({[=] { RunForwardKernel<ForwardSteps>(maps, params); }, blocks});
  return {};
}

// As LaunchBackward of cuda/kernel/backward.cu.
template <typename Gradients, bool kTakesGateUp>
void RunBackwardKernel(const BackwardMaps& maps, const BackwardParams& params) {
  params.dims.R > 1 ? Skeleton<BackwardSteps<Gradients, kTakesGateUp, true>>::Run(maps, params)
                    : Skeleton<BackwardSteps<Gradients, kTakesGateUp>>::Run(maps, params);
}

CudaStatus LaunchBackward(cudaStream_t, int blocks, const BackwardMaps& maps,
                          const BackwardParams& params, bool float_gradients, bool) {
  const bool takes = params.gate_up != nullptr;
  const auto run =
      float_gradients
          ? (takes ? RunBackwardKernel<F32Gradients, true> : RunBackwardKernel<F32Gradients, false>)
          : (takes ? RunBackwardKernel<Bf16Gradients, true>
                   : RunBackwardKernel<Bf16Gradients, false>);
  const auto adding = Skeleton<BackwardSteps<AddedGradients, false, true>>::Run;
  const auto chosen = params.pass > 0 ? adding : run;
  streams[current_rank].push_back({[=] { chosen(maps, params); }, blocks});
  return {};
}

}  // namespace megamoe

namespace {

// No rank needs what another one holds of a call that has ended there, nor has written of the next:
// all but the flags.
void Spoil(const Header& h, int rank, const megamoe::PeerArrays& a) {
  const auto spoil = [](void* data, int64_t bytes) { std::memset(data, 0xff, bytes); };
  const int64_t slots = int64_t{h.T} * h.K;
  const int64_t elements = int64_t{h.T} * h.H;
  spoil(a.x[rank], elements * kBf16Bytes);
  spoil(a.dy[rank], elements * kBf16Bytes);
  spoil(a.expert_idx[rank], h.R * slots * sizeof(int32_t));
  spoil(a.expert_weight[rank], h.R * slots * sizeof(float));
  spoil(a.sums[rank], h.R * elements * (h.bf16_sums != 0 ? kBf16Bytes : sizeof(float)));
  spoil(a.dw[rank], slots * sizeof(float));
}

// Reads a call of a rank and enqueues it.
void Enqueue(FILE* file, const Header& h, const CallHeader& c, const megamoe::Peers& peers,
             Results* out) {
  current_rank = peers.rank;
  const megamoe::RoutingDims dims = {h.T, h.K, h.E, h.R};
  LayerCall layer = ReadLayer(file, h, c, peers.rank, peers.epoch);
  layer.peers = megamoe::PeerArraysOf(peers, dims, h.H, h.bf16_sums != 0);
  if ((h.failed_ranks >> peers.rank & 1) != 0) {
    const auto fail = [peers] { waits[peers.rank].failed_epoch = peers.epoch; };
    streams[current_rank].push_back({fail, 0});
  }
  const megamoe::CudaStatus status =
      c.is_backward != 0 ? megamoe::RunBackward(nullptr, Backward(file, h, c, layer, out))
                         : megamoe::RunForward(nullptr, Forward(file, h, c, layer, out));
  if (!status.ok()) emulator::Fail(status.call);
  const auto spoil = [&h, rank = peers.rank, arrays = layer.peers] { Spoil(h, rank, arrays); };
  streams[current_rank].push_back({spoil, 0});
}

// Shows each rank what it sees of the others, and runs all calls.
void RunRanks(FILE* file, const Header& h, Results* out) {
  waits.resize(h.R);
  for (WaitState& wait : waits) wait.page.ended_ranks = static_cast<uint32_t>(h.ended_ranks);
  megamoe::Peers peers = {};
  peers.bytes = megamoe::PeerArrayBytes({h.T, h.K, h.E, h.R}, h.H, h.bf16_sums != 0);
  if (peers.bytes != h.peer_bytes) emulator::Fail("jax_megamoe/memory.py has other bytes");
  peers.num_ranks = h.R;
  for (int r = 0; r < h.R; ++r) {
    // As fresh memory is; what calls before have left is never taken for this one's.
    peers.base[r] = static_cast<std::byte*>(Allocate(peers.bytes));
    std::memset(peers.base[r], 0, peers.bytes);
  }
  streams.resize(h.R);
  for (int i = 0; i < h.num_calls; ++i) {
    const CallHeader& c = *Read<CallHeader>(file, 1);
    peers.epoch = kFirstEpoch + i;
    for (int r = 0; r < h.R; ++r) {
      peers.rank = r;
      Enqueue(file, h, c, peers, out);
    }
  }
  emulator::RunStreams(streams);
  for (const WaitState& wait : waits) {
    const bool is_late =
        wait.page.record_epoch != 0 && wait.page.record.cause == megamoe::FaultCause::kDeadline;
    if (is_late && wait.page.long_wait == 0) emulator::Fail("nobody was told of a long wait");
    std::memcpy(out->Add(sizeof(uint32_t)), &wait.failed_epoch, sizeof(uint32_t));
  }
}

}  // namespace

int main(int argc, char** argv) {
  FILE* file = argc == 3 ? std::fopen(argv[1], "rb") : nullptr;
  if (file == nullptr) emulator::Fail("usage: emulator IN OUT");
  const Header& h = *Read<Header>(file, 1);
  num_multiprocessors = h.multiprocessors;
  emulator::Seed(h.seed);
  megamoe::seeded_fault = h.fault;
  Results results;
  RunRanks(file, h, &results);
  results.Write(argv[2]);
}
