#include "calls.h"

#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>

#include "canaries.h"
#include "host/backward.h"
#include "host/backward_fp8.h"
#include "host/forward.h"
#include "host/forward_fp8.h"
#include "host/peer_arrays.h"
#include "shared/fp8.h"

namespace ranks {
namespace {

using megamoe::LayerCall;

constexpr int64_t kBf16Bytes = 2;
constexpr uint32_t kFirstEpoch = 1;
constexpr int kWritesBehind = -1;  // Header::fault

struct CallHeader {
  int32_t is_backward, num_steps, float_gradients, keep_gate_up, num_launches;
  int32_t trace_records;  // rows of the trace, the last result; 0: none
  int32_t has_biases;
  float alpha, beta, limit, offset;
  int32_t is_fp8;  // launches lie behind an even number of these
  int32_t tiles_m[megamoe::kMaxSteps], tiles_n[megamoe::kMaxSteps], lag[megamoe::kMaxSteps];
  int64_t launches[8];
};

// One run of a file.
class Runner {
 public:
  Runner(FILE* in, const Header& header, Machine& machine)
      : in_(in), h_(header), machine_(machine), canaries_(machine) {}

  // Shows each rank what it sees of the others, and runs all calls.
  void Run() {
    megamoe::Peers peers = {};
    peers.bytes = megamoe::PeerArrayBytes(layout());
    if (peers.bytes != h_.peer_bytes) Fail("jax_megamoe/_call_arrays.py has other bytes");
    peers.num_ranks = h_.R;
    for (int r = 0; r < h_.R; ++r) {
      // As fresh memory is; what calls before have left is never taken for this one's.
      peers.base[r] = static_cast<std::byte*>(canaries_.Allocate(peers.bytes));
      const std::vector<std::byte> zeros(peers.bytes);
      machine_.CopyIn(peers.base[r], zeros.data(), peers.bytes);
    }
    for (int r = 0; r < h_.R; ++r) AddGaps(peers, r);
    // All of it is allocated before a call runs: that may wait for a GPU whose calls wait.
    headers_.resize(h_.num_calls);
    std::vector<std::function<void()>> calls;
    for (int i = 0; i < h_.num_calls; ++i) {
      ReadHost(&headers_[i], 1);
      peers.epoch = kFirstEpoch + i;
      for (int r = 0; r < h_.R; ++r) {
        peers.rank = r;
        calls.push_back(ReadCall(headers_[i], peers));
      }
    }
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < calls.size(); ++i) Enqueue(i / h_.R, i % h_.R, calls[i]);
    if (h_.fault == kWritesBehind) WriteBehind();
    machine_.Run();
    run_ns_ = std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin).count();
    canaries_.Check();
  }

  // The results of the calls, in their order, and what has failed.
  void Write(FILE* out) {
    for (const Result& result : results_) {
      std::vector<char> bytes(result.bytes);
      machine_.CopyOut(bytes.data(), result.data, result.bytes);
      std::fwrite(bytes.data(), 1, bytes.size(), out);
    }
    for (int r = 0; r < h_.R; ++r) {
      const uint32_t epoch = machine_.FailedEpoch(r);
      std::fwrite(&epoch, sizeof(epoch), 1, out);
      std::fwrite(&machine_.Record(r), sizeof(megamoe::FaultRecord), 1, out);
    }
    std::fwrite(&run_ns_, sizeof(run_ns_), 1, out);
  }

 private:
  struct Result {
    void* data;
    int64_t bytes;
  };

  megamoe::RoutingDims dims() const { return {h_.T, h_.K, h_.E, h_.R}; }
  megamoe::PeerLayout layout() const {
    return {dims(), h_.H, h_.bf16_sums != 0, h_.has_codes != 0};
  }
  int64_t weights() const { return int64_t{h_.E} / h_.R * h_.H * h_.I; }

  // What the call of a rank still does of it.
  void Enqueue(size_t call, size_t rank, const std::function<void()>& enqueue) {
    const bool is_whole = rank != 0 || h_.whole_calls < 0 || call < size_t(h_.whole_calls);
    if (is_whole) {
      enqueue();
    } else if (call == size_t(h_.whole_calls) && h_.stalled_kernels >= 0) {
      machine_.EnqueueStart(h_.stalled_kernels, enqueue);
    }
  }

  template <typename T>
  void ReadHost(T* to, int64_t count) {
    const size_t wanted = static_cast<size_t>(count);
    if (std::fread(to, sizeof(T), wanted, in_) != wanted) Fail("IN is too short");
  }
  template <typename T>
  T* Read(int64_t count) {
    std::vector<T> host(count);
    ReadHost(host.data(), count);
    void* data = canaries_.Allocate(count * sizeof(T));
    machine_.CopyIn(data, host.data(), count * sizeof(T));
    return static_cast<T*>(data);
  }
  void* ReadBf16(int64_t count) { return Read<uint16_t>(count); }

  void* AddResult(int64_t bytes) {
    results_.push_back({canaries_.Allocate(bytes), bytes});
    return results_.back().data;
  }
  void* Pool(const LayerCall& layer, int64_t columns) {
    return canaries_.Allocate(layer.pool_rows * columns * kBf16Bytes);
  }
  uint32_t* Counters(int64_t count) {
    return static_cast<uint32_t*>(canaries_.Allocate(count * sizeof(uint32_t)));
  }
  // A call that is traced gets it behind its other results.
  megamoe::TraceBuffer Trace(const CallHeader& c) {
    if (c.trace_records == 0) return {};
    void* records = AddResult(int64_t{c.trace_records} * sizeof(megamoe::TraceRecord));
    const uint32_t others = h_.R > 1 ? 1 + megamoe::kTrafficRecords : 1;
    return {static_cast<megamoe::TraceRecord*>(records), c.trace_records - others};
  }

  // Reads a call of a rank; what it returns enqueues it.
  std::function<void()> ReadCall(const CallHeader& c, const megamoe::Peers& peers) {
    LayerCall layer = {};
    layer.peers = megamoe::PeerArraysOf(peers, layout());
    layer.plan.rank = peers.rank;
    const std::vector<PlanPointers> plans = ReadLayer(c, &layer);
    const auto enqueue = [=, this](auto call, const auto& run) {
      call.wait = machine_.Begin(peers.rank, peers.epoch, plans);
      const megamoe::CudaStatus status = run(machine_.Stream(), call);
      if (!status.ok()) Fail(status.call);
      Spoil(peers.rank, call.peers);
    };
    if (c.is_fp8 != 0 && c.is_backward != 0) {
      return [=, call = Fp8Backward(c, layer)] { enqueue(call, megamoe::RunFp8Backward); };
    }
    if (c.is_fp8 != 0) {
      return [=, call = Fp8Forward(c, layer)] { enqueue(call, megamoe::RunFp8Forward); };
    }
    if (c.is_backward != 0) {
      return [=, call = Backward(c, layer)] { enqueue(call, megamoe::RunBackward); };
    }
    return [=, call = Forward(c, layer)] { enqueue(call, megamoe::RunForward); };
  }

  // Returns the plan of each pass.
  std::vector<PlanPointers> ReadLayer(const CallHeader& c, LayerCall* call) {
    call->plan.dims = dims();
    call->plan.pool_routes = h_.pool_routes;
    call->plan.num_steps = c.num_steps;
    for (int s = 0; s < c.num_steps; ++s) {
      call->plan.steps[s] = {c.tiles_m[s], c.tiles_n[s], c.lag[s]};
    }
    const auto fields = megamoe::PlanFields(call->plan);
    std::vector<PlanPointers> plans(h_.has_plans != 0 ? megamoe::MaxPasses(call->plan) : 0);
    for (PlanPointers& plan : plans) {
      for (int i = 0; i < kNumPlanArrays; ++i) plan[i] = Read<int32_t>(fields[i].elements);
    }
    PlanPointers arrays = {};
    for (size_t i = 0; i < arrays.size(); ++i) {
      arrays[i] = canaries_.Allocate(fields[i].elements * sizeof(int32_t));
    }
    call->plan_arrays = std::bit_cast<megamoe::PlanArrays>(arrays);
    call->H = h_.H;
    call->I = h_.I;
    call->num_blocks = h_.num_blocks;
    call->num_multiprocessors = h_.multiprocessors;
    call->pool_rows = megamoe::PoolRows(call->plan);
    call->expert_idx = Read<int32_t>(int64_t{h_.T} * h_.K);
    call->expert_weight = Read<float>(int64_t{h_.T} * h_.K);
    call->unit = {c.alpha, c.beta, c.limit, c.offset};
    call->launches = c.launches;
    call->num_launches = c.num_launches;
    return plans;
  }

  void ReadBiases(const CallHeader& c, LayerCall* call) {
    if (c.has_biases == 0) return;
    const int64_t experts = h_.E / h_.R;
    call->biases.gate = Read<float>(experts * h_.I);
    call->biases.up = Read<float>(experts * h_.I);
    call->biases.down = Read<float>(experts * h_.H);
  }
  float* BiasGradient(int64_t columns) {
    return static_cast<float*>(AddResult(h_.E / h_.R * columns * int64_t{sizeof(float)}));
  }

  megamoe::ForwardCall Forward(const CallHeader& c, const LayerCall& layer) {
    megamoe::ForwardCall call = {};
    static_cast<LayerCall&>(call) = layer;
    call.x = ReadBf16(int64_t{h_.T} * h_.H);
    call.w_gate = ReadBf16(weights());
    call.w_up = ReadBf16(weights());
    call.w_down = ReadBf16(weights());
    ReadBiases(c, &call);
    call.y = AddResult(int64_t{h_.T} * h_.H * kBf16Bytes);
    call.pool = Pool(layer, h_.H);
    call.h = Pool(layer, h_.I);
    if (c.keep_gate_up != 0) call.gate_up = AddResult(layer.pool_rows * 2 * h_.I * kBf16Bytes);
    call.counters = Counters(megamoe::NumForwardCounters(call.pool_rows));
    call.trace = Trace(c);
    return call;
  }

  // Of M x N weights.
  const void* Codes(int64_t M, int64_t N) { return Read<uint8_t>(h_.E / h_.R * M * N); }
  const float* Scales(int64_t M, int64_t N) {
    return Read<float>(h_.E / h_.R * (M / megamoe::kFp8Group) * (N / megamoe::kFp8Group));
  }
  megamoe::QuantizedMatrix Quantized(int64_t M, int64_t N) {
    const void* const codes = Codes(M, N);
    return {codes, Scales(M, N)};
  }
  void* CodeRows(int64_t rows, int D) {
    return canaries_.Allocate(rows * megamoe::CodeRowBytes(D));
  }

  // On one rank a result behind y is what x is quantised to.
  megamoe::Fp8ForwardCall Fp8Forward(const CallHeader& c, const LayerCall& layer) {
    megamoe::Fp8ForwardCall call = {};
    static_cast<LayerCall&>(call) = layer;
    call.x = ReadBf16(int64_t{h_.T} * h_.H);
    call.w_gate = Quantized(h_.H, h_.I);
    call.w_up = Quantized(h_.H, h_.I);
    call.w_down = Quantized(h_.I, h_.H);
    call.y = AddResult(int64_t{h_.T} * h_.H * kBf16Bytes);
    call.x_codes = h_.R > 1 ? layer.peers.x_codes[layer.plan.rank]
                            : AddResult(int64_t{h_.T} * megamoe::CodeRowBytes(h_.H));
    call.x_pool = CodeRows(layer.pool_rows, h_.H);
    call.h = CodeRows(layer.pool_rows, h_.I);
    call.o = Pool(layer, h_.H);
    if (c.keep_gate_up != 0) call.gate_up = AddResult(layer.pool_rows * 2 * h_.I * kBf16Bytes);
    call.counters = Counters(megamoe::NumForwardCounters(call.pool_rows));
    call.trace = Trace(c);
    return call;
  }

  megamoe::BackwardCall Backward(const CallHeader& c, const LayerCall& layer) {
    megamoe::BackwardCall call = {};
    static_cast<LayerCall&>(call) = layer;
    call.x = ReadBf16(int64_t{h_.T} * h_.H);
    call.w_gate = ReadBf16(weights());
    call.w_up = ReadBf16(weights());
    call.w_down = ReadBf16(weights());
    FillBackward(c, &call);
    return call;
  }

  // g and u are computed again with `transposed`.
  megamoe::BackwardMatrix BackwardQuantized(int64_t M, int64_t N, bool has_transposed) {
    megamoe::BackwardMatrix matrix = {};
    matrix.natural = Codes(M, N);
    if (has_transposed) matrix.transposed = Codes(N, M);
    matrix.scales = Scales(M, N);
    return matrix;
  }

  megamoe::Fp8BackwardCall Fp8Backward(const CallHeader& c, const LayerCall& layer) {
    megamoe::Fp8BackwardCall call = {};
    static_cast<LayerCall&>(call) = layer;
    call.x = ReadBf16(int64_t{h_.T} * h_.H);
    call.gate = BackwardQuantized(h_.H, h_.I, true);
    call.up = BackwardQuantized(h_.H, h_.I, true);
    call.down = BackwardQuantized(h_.I, h_.H, false);
    FillBackward(c, &call);
    const int rank = layer.plan.rank;
    call.dy_codes = h_.R > 1 ? layer.peers.dy_codes[rank] : CodeRows(h_.T, h_.H);
    call.dy_code_pool = CodeRows(layer.pool_rows, h_.H);
    call.dz_codes = CodeRows(layer.pool_rows, 2 * h_.I);
    if (!megamoe::MakesGateUp(call)) return call;
    call.x_codes = h_.R > 1 ? layer.peers.x_codes[rank] : CodeRows(h_.T, h_.H);
    call.x_code_pool = CodeRows(layer.pool_rows, h_.H);
    return call;
  }

  // All but x and the weights.
  void FillBackward(const CallHeader& c, megamoe::BackwardCall* to) {
    megamoe::BackwardCall& call = *to;
    call.dy = ReadBf16(int64_t{h_.T} * h_.H);
    ReadBiases(c, &call);
    if (c.keep_gate_up != 0) call.gate_up = ReadBf16(call.pool_rows * 2 * h_.I);
    call.dx = AddResult(int64_t{h_.T} * h_.H * kBf16Bytes);
    call.dw = static_cast<float*>(AddResult(int64_t{h_.T} * h_.K * sizeof(float)));
    call.float_gradients = c.float_gradients != 0;
    if (c.num_steps == 4) {
      const int64_t bytes = weights() * (call.float_gradients ? sizeof(float) : kBf16Bytes);
      for (void** gradient : {&call.dw_gate, &call.dw_up, &call.dw_down}) {
        *gradient = AddResult(bytes);
      }
      if (c.has_biases != 0) {
        call.dbiases = {BiasGradient(h_.I), BiasGradient(h_.I), BiasGradient(h_.H)};
      }
    }
    if (c.has_biases != 0) {
      call.bias_rows =
          static_cast<float2*>(canaries_.Allocate(call.pool_rows * int64_t{sizeof(float2)}));
    }
    for (void** pool : {&call.x_pool, &call.dy_pool, &call.dx_pool}) *pool = Pool(call, h_.H);
    for (void** pool : {&call.dg, &call.du, &call.wh}) *pool = Pool(call, h_.I);
    const int64_t partials = call.pool_rows * megamoe::NumDgradDownTiles(h_.I);
    call.dw_partial = static_cast<float*>(canaries_.Allocate(partials * sizeof(float)));
    call.counters = Counters(megamoe::NumBackwardCounters(call.pool_rows, h_.E / h_.R));
    call.trace = Trace(c);
  }

  // Of the workspace of a rank, all but the flags.
  std::vector<Result> SharedArrays(int rank, const megamoe::PeerArrays& a) const {
    const int64_t slots = int64_t{h_.T} * h_.K;
    const int64_t elements = int64_t{h_.T} * h_.H;
    const int64_t sum_bytes = h_.bf16_sums != 0 ? kBf16Bytes : int64_t{sizeof(float)};
    const int64_t code_bytes = h_.has_codes != 0 ? h_.T * megamoe::CodeRowBytes(h_.H) : 0;
    return {{a.x[rank], elements * kBf16Bytes},
            {a.dy[rank], elements * kBf16Bytes},
            {a.x_codes[rank], code_bytes},
            {a.dy_codes[rank], code_bytes},
            {a.expert_idx[rank], h_.R * slots * int64_t{sizeof(int32_t)}},
            {a.expert_weight[rank], h_.R * slots * int64_t{sizeof(float)}},
            {a.sums[rank], h_.R * elements * sum_bytes},
            {a.dw[rank], slots * int64_t{sizeof(float)}}};
  }

  // Between the arrays of the workspace of a rank.
  void AddGaps(megamoe::Peers peers, int rank) {
    constexpr int64_t kFlagBytes = sizeof(uint32_t);
    peers.rank = rank;
    for (peers.epoch = 0; peers.epoch < 2; ++peers.epoch) {  // calls take turns with some arrays
      const megamoe::PeerArrays a = megamoe::PeerArraysOf(peers, layout());
      for (const Result& array : SharedArrays(rank, a)) canaries_.AddGap(array.data, array.bytes);
      canaries_.AddGap(a.blocks_done, kFlagBytes);
      canaries_.AddGap(a.inputs_done[rank], h_.R * kFlagBytes);
      canaries_.AddGap(a.sums_done[rank], h_.R * h_.T * kFlagBytes);
    }
  }

  // As a kernel that is wrong would: a byte behind the first result of rank 0.
  void WriteBehind() {
    const Result& first = results_.front();
    if (cudaMemsetAsync(static_cast<std::byte*>(first.data) + first.bytes, 0, 1,
                        machine_.Stream()) != cudaSuccess) {
      Fail("cudaMemsetAsync");
    }
  }

  // No rank needs what another one holds of a call that has ended there, nor has written of the
  // next.
  void Spoil(int rank, const megamoe::PeerArrays& a) {
    for (const Result& array : SharedArrays(rank, a)) {
      if (cudaMemsetAsync(array.data, 0xff, array.bytes, machine_.Stream()) != cudaSuccess) {
        Fail("cudaMemsetAsync");
      }
    }
  }

  FILE* const in_;
  const Header& h_;
  Machine& machine_;
  Canaries canaries_;
  std::vector<CallHeader> headers_;  // the calls point into them
  std::vector<Result> results_;
  int64_t run_ns_ = 0;
};

}  // namespace

void RunFile(const char* in, const char* out, Machine& (*start)(const Header&)) {
  FILE* file = std::fopen(in, "rb");
  Header header;
  if (file == nullptr || std::fread(&header, sizeof(header), 1, file) != 1) Fail("no IN");
  Runner runner(file, header, start(header));
  runner.Run();
  FILE* results = std::fopen(out, "wb");
  if (results == nullptr) Fail("no OUT");
  runner.Write(results);
  std::fclose(results);
}

void Fail(const char* why) {
  std::fprintf(stderr, "%s\n", why);
  std::exit(1);
}

}  // namespace ranks
