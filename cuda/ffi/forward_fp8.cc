#include "ffi/forward_fp8.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/arguments.h"
#include "ffi/codes.h"
#include "ffi/common.h"
#include "ffi/group.h"
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

// An M x N matrix of each of E experts of the rank. name: of the argument that it was made of.
ffi::ErrorOr<QuantizedMatrix> ReadMatrix(const char* name, const Codes& codes, const Scales& scales,
                                         int64_t E, int64_t M, int64_t N) {
  for (const ffi::Error& error : {CheckCodes(kPass, name, "transposed", codes, E, N, M),
                                  CheckScales(kPass, name, scales, E, M, N)}) {
    if (error.failure()) return error;
  }
  return QuantizedMatrix{codes.untyped_data(), scales.typed_data()};
}

struct Fp8Weights {
  const Codes& gate;          // [E/R, I, H]
  const Scales& gate_scales;  // [E/R, H / 128, I / 128]
  const Codes& up;            // [E/R, I, H]
  const Scales& up_scales;    // [E/R, H / 128, I / 128]
  const Codes& down;          // [E/R, H, I]
  const Scales& down_scales;  // [E/R, I / 128, H / 128]
};

// Of the sizes of the call.
ffi::Error ReadWeights(const Fp8Weights& w, Fp8ForwardCall* call) {
  const int64_t E = call->plan.dims.experts_per_rank(), H = call->H, I = call->I;
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

// y, the plan, on one rank what x is quantised to, the pools and counters, perhaps what is kept,
// perhaps a trace.
ffi::Error ReadResults(ffi::RemainingRets& results, bool keeps_gate_up, Fp8ForwardCall* call) {
  const int64_t T = call->plan.dims.T, P = call->pool_rows;
  const int64_t x_bytes = CodeRowBytes(call->H), h_bytes = CodeRowBytes(call->I);
  const bool has_peers = call->plan.dims.R > 1;
  int at = 1 + kNumPlanResults;
  if (!has_peers) {
    const auto x_codes = ReadResult<ffi::U8>(results, at++, "x_codes", T * x_bytes);
    if (x_codes.has_error()) return x_codes.error();
    call->x_codes = *x_codes;
  }
  const auto y = ReadResult<ffi::BF16>(results, 0, "y", T * call->H);
  const auto x_pool = ReadResult<ffi::U8>(results, at++, "x_pool", P * x_bytes);
  const auto h = ReadResult<ffi::U8>(results, at++, "h", P * h_bytes);
  const auto o = ReadResult<ffi::BF16>(results, at++, "o", P * call->H);
  const auto counters = ReadResult<ffi::S32>(results, at++, "counters", NumForwardCounters(P));
  for (const auto* pointer : {&y, &x_pool, &h, &o, &counters}) {
    if (pointer->has_error()) return pointer->error();
  }
  if (keeps_gate_up) {
    const auto gate_up = ReadResult<ffi::BF16>(results, at++, "gate_up", 2 * P * call->I);
    if (gate_up.has_error()) return gate_up.error();
    call->gate_up = *gate_up;
  }
  call->y = *y;
  call->x_pool = *x_pool;
  call->h = *h;
  call->o = *o;
  call->counters = static_cast<uint32_t*>(*counters);
  return ReadLayerResults(results, 1, static_cast<size_t>(at), call);
}

// group: null for one rank.
ffi::Error Run(cudaStream_t stream, int32_t device, const GroupCall* group,
               const TokenOperands& tokens, const Fp8Weights& weights, ffi::RemainingRets& results,
               const ffi::Dictionary& attributes) {
  if (ffi::Error error = CheckRank(kPass, "w_gate.transposed", weights.gate); error.failure()) {
    return error;
  }
  const int num_ranks = group == nullptr ? 1 : group->peers.num_ranks;
  const ffi::Span<const int64_t> sizes = weights.gate.dimensions();
  const auto layer = ReadTokenCall(kPass, kParts, tokens, {sizes[0], sizes[2], sizes[1], kFp8Group},
                                   num_ranks, attributes);
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
  if (ffi::Error error = ReadWeights(weights, &call); error.failure()) return error;
  if (ffi::Error error = ReadResults(results, *keeps_gate_up != 0, &call); error.failure()) {
    return error;
  }
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  call.x = tokens.x.untyped_data();
  SetPeers(device, *deadline_ns, group, &call);
  if (group != nullptr) call.x_codes = call.peers.x_codes[group->peers.rank];
  return FromCuda(RunFp8Forward(stream, call));
}

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix x, Ids expert_idx,
                   RouteWeights expert_weight, Codes gate, Scales gate_scales, Codes up,
                   Scales up_scales, Codes down, Scales down_scales, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  return Run(stream, device, nullptr, {x, expert_idx, expert_weight},
             {gate, gate_scales, up, up_scales, down, down_scales}, results, attributes);
}

ffi::Error ExecuteInGroup(Communicators communicators, cudaStream_t stream, int32_t device,
                          Bf16Matrix x, Ids expert_idx, RouteWeights expert_weight, Codes gate,
                          Scales gate_scales, Codes up, Scales up_scales, Codes down,
                          Scales down_scales, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return RunLayerInGroup(communicators, device, attributes, [&](const GroupCall& group) {
    return Run(stream, device, &group, {x, expert_idx, expert_weight},
               {gate, gate_scales, up, up_scales, down, down_scales}, results, attributes);
  });
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, PrepareLayer,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());

template <typename Binding>
auto WithOperands(Binding&& binding) {
  return WithTokenOperands(WithDevice(std::move(binding)))
      .template Arg<Codes>()  // of w_gate
      .template Arg<Scales>()
      .template Arg<Codes>()  // of w_up
      .template Arg<Scales>()
      .template Arg<Codes>()  // of w_down
      .template Arg<Scales>()
      .RemainingRets()
      .Attrs();
}
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute, WithOperands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(GroupHandler, ExecuteInGroup,
                       WithOperands(ffi::Ffi::Bind().Ctx<CollectivesContext>()));

}  // namespace

XLA_FFI_Error* PrepareFp8Forward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteFp8Forward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }
XLA_FFI_Error* ExecuteGroupFp8Forward(XLA_FFI_CallFrame* frame) { return GroupHandler(frame); }

}  // namespace megamoe
