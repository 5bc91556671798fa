#include "ffi/forward_fp8.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "ffi/arguments.h"
#include "ffi/codes.h"
#include "ffi/common.h"
#include "ffi/layer.h"
#include "host/forward.h"
#include "host/forward_fp8.h"
#include "shared/fp8.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

constexpr char kPass[] = "forward_fp8";
constexpr int kNumSteps = 2;
constexpr int64_t kParts = kDispatch | kGateUp | kDown | kCombine | kFinish;

// An M x N matrix of each of E experts. name: of the argument that it was made of.
ffi::ErrorOr<QuantizedMatrix> ReadMatrix(const char* name, const Codes& codes, const Scales& scales,
                                         int64_t E, int64_t M, int64_t N) {
  for (const ffi::Error& error : {CheckCodes(kPass, name, "transposed", codes, E, N, M),
                                  CheckScales(kPass, name, scales, E, M, N)}) {
    if (error.failure()) return error;
  }
  return QuantizedMatrix{codes.untyped_data(), scales.typed_data()};
}

struct Fp8Weights {
  const Codes& gate;          // [E, I, H]
  const Scales& gate_scales;  // [E, H / 128, I / 128]
  const Codes& up;            // [E, I, H]
  const Scales& up_scales;    // [E, H / 128, I / 128]
  const Codes& down;          // [E, H, I]
  const Scales& down_scales;  // [E, I / 128, H / 128]
};

// Of the sizes of the call.
ffi::Error ReadWeights(const Fp8Weights& w, Fp8ForwardCall* call) {
  const int64_t E = call->plan.dims.E, H = call->H, I = call->I;
  const auto gate = ReadMatrix("w_gate", w.gate, w.gate_scales, E, H, I);
  const auto up = ReadMatrix("w_up", w.up, w.up_scales, E, H, I);
  const auto down = ReadMatrix("w_down", w.down, w.down_scales, E, I, H);
  for (const auto* matrix : {&gate, &up, &down}) {
    if (matrix->has_error()) return matrix->error();
  }
  call->w_gate = *gate;
  call->w_up = *up;
  call->w_down = *down;
  return ffi::Error::Success();
}

// y, the plan, what is quantised, the pools and counters, perhaps what is kept, perhaps a trace.
ffi::Error ReadResults(ffi::RemainingRets& results, bool keeps_gate_up, Fp8ForwardCall* call) {
  constexpr int kFirst = 1 + kNumPlanResults;
  constexpr int kKept = kFirst + 5;
  const size_t trace = keeps_gate_up ? kKept + 1 : kKept;
  if (ffi::Error error = ReadLayerResults(results, 1, trace, call); error.failure()) return error;
  const int64_t T = call->plan.dims.T;
  const int64_t P = call->pool_rows;
  const int64_t x_bytes = CodeRowBytes(call->H), h_bytes = CodeRowBytes(call->I);
  const auto y = ReadResult<ffi::BF16>(results, 0, "y", T * call->H);
  const auto x_codes = ReadResult<ffi::U8>(results, kFirst, "x_codes", T * x_bytes);
  const auto x_pool = ReadResult<ffi::U8>(results, kFirst + 1, "x_pool", P * x_bytes);
  const auto h = ReadResult<ffi::U8>(results, kFirst + 2, "h", P * h_bytes);
  const auto o = ReadResult<ffi::BF16>(results, kFirst + 3, "o", P * call->H);
  const auto counters =
      ReadResult<ffi::S32>(results, kFirst + 4, "counters", NumForwardCounters(P));
  for (const auto* pointer : {&y, &x_codes, &x_pool, &h, &o, &counters}) {
    if (pointer->has_error()) return pointer->error();
  }
  if (keeps_gate_up) {
    const auto gate_up = ReadResult<ffi::BF16>(results, kKept, "gate_up", 2 * P * call->I);
    if (gate_up.has_error()) return gate_up.error();
    call->gate_up = *gate_up;
  }
  call->y = *y;
  call->x_codes = *x_codes;
  call->x_pool = *x_pool;
  call->h = *h;
  call->o = *o;
  call->counters = static_cast<uint32_t*>(*counters);
  return ffi::Error::Success();
}

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix x, Ids expert_idx,
                   RouteWeights expert_weight, Codes gate, Scales gate_scales, Codes up,
                   Scales up_scales, Codes down, Scales down_scales, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  if (ffi::Error error = CheckRank(kPass, "w_gate.transposed", gate); error.failure()) return error;
  const ffi::Span<const int64_t> sizes = gate.dimensions();
  const auto layer = ReadTokenCall(kPass, kParts, {x, expert_idx, expert_weight},
                                   {sizes[0], sizes[2], sizes[1], kFp8Group}, 1, attributes);
  if (layer.has_error()) return layer.error();
  if (layer->plan.num_steps != kNumSteps) {
    return Invalid(std::string(kPass) + ": attribute steps is not that of two steps");
  }
  const auto deadline_ns = ReadDeadline(attributes);
  if (deadline_ns.has_error()) return deadline_ns.error();
  const auto keeps_gate_up = ReadKeepsGateUp(attributes);
  if (keeps_gate_up.has_error()) return keeps_gate_up.error();
  Fp8ForwardCall call = {};
  static_cast<LayerCall&>(call) = *layer;
  if (IsGeneral(call.unit, call.biases)) {
    return Invalid(std::string(kPass) + ": the attributes are not those of swiglu");
  }
  const Fp8Weights weights = {gate, gate_scales, up, up_scales, down, down_scales};
  if (ffi::Error error = ReadWeights(weights, &call); error.failure()) return error;
  if (ffi::Error error = ReadResults(results, *keeps_gate_up != 0, &call); error.failure()) {
    return error;
  }
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  call.x = x.untyped_data();
  SetPeers(device, *deadline_ns, nullptr, &call);
  return FromCuda(RunFp8Forward(stream, call));
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, PrepareLayer,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());

XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       WithDevice(ffi::Ffi::Bind())
                           .Arg<Bf16Matrix>()    // x
                           .Arg<Ids>()           // expert_idx
                           .Arg<RouteWeights>()  // expert_weight
                           .Arg<Codes>()         // of w_gate
                           .Arg<Scales>()
                           .Arg<Codes>()  // of w_up
                           .Arg<Scales>()
                           .Arg<Codes>()  // of w_down
                           .Arg<Scales>()
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Error* PrepareFp8Forward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteFp8Forward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }

}  // namespace megamoe
