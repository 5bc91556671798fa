#include "ffi/forward.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "ffi/group.h"
#include "ffi/layer.h"
#include "host/forward.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

constexpr int kNumSteps = 2;
constexpr int64_t kParts = kDispatch | kGateUp | kDown | kCombine | kFinish;

// group: null for one rank.
ffi::Error Run(cudaStream_t stream, int32_t device, const GroupCall* group,
               const LayerOperands& operands, ffi::RemainingArgs& others,
               ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  const int num_ranks = group == nullptr ? 1 : group->peers.num_ranks;
  const auto layer = ReadLayerCall("forward", kParts, operands, num_ranks, attributes);
  if (layer.has_error()) return layer.error();
  if (layer->plan.num_steps != kNumSteps) {
    return Invalid("forward: attribute steps is not that of two steps");
  }
  const auto deadline_ns = ReadDeadline(attributes);
  if (deadline_ns.has_error()) return deadline_ns.error();
  const auto keeps_gate_up = ReadKeepsGateUp(attributes);
  if (keeps_gate_up.has_error()) return keeps_gate_up.error();
  ForwardCall call = {};
  static_cast<LayerCall&>(call) = *layer;
  if (ffi::Error error = ReadBiases("forward", others, attributes, &call); error.failure()) {
    return error;
  }
  // y, the plan, the pools and counters, perhaps what is kept, perhaps a trace.
  constexpr int kFirst = 1 + kNumPlanResults;
  constexpr int kKept = kFirst + 3;
  const size_t trace = *keeps_gate_up != 0 ? kKept + 1 : kKept;
  if (ffi::Error error = ReadLayerResults(results, 1, trace, &call); error.failure()) return error;
  const int64_t T = call.plan.dims.T;
  const int64_t P = call.pool_rows;
  const auto y = ReadResult<ffi::BF16>(results, 0, "y", T * call.H);
  const auto pool = ReadResult<ffi::BF16>(results, kFirst, "pool", P * call.H);
  const auto h = ReadResult<ffi::BF16>(results, kFirst + 1, "h", P * call.I);
  const auto counters =
      ReadResult<ffi::S32>(results, kFirst + 2, "counters", NumForwardCounters(P));
  for (const auto* pointer : {&y, &pool, &h, &counters}) {
    if (pointer->has_error()) return pointer->error();
  }
  if (*keeps_gate_up != 0) {
    const auto gate_up = ReadResult<ffi::BF16>(results, kKept, "gate_up", 2 * P * call.I);
    if (gate_up.has_error()) return gate_up.error();
    call.gate_up = *gate_up;
  }
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  call.x = operands.x.untyped_data();
  call.w_gate = operands.w_gate.untyped_data();
  call.w_up = operands.w_up.untyped_data();
  call.w_down = operands.w_down.untyped_data();
  call.y = *y;
  call.pool = *pool;
  call.h = *h;
  call.counters = static_cast<uint32_t*>(*counters);
  SetPeers(device, *deadline_ns, group, &call);
  return FromCuda(RunForward(stream, call));
}

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix x, Ids expert_idx,
                   RouteWeights expert_weight, Bf16Experts w_gate, Bf16Experts w_up,
                   Bf16Experts w_down, ffi::RemainingArgs others, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  return Run(stream, device, nullptr, {x, expert_idx, expert_weight, w_gate, w_up, w_down}, others,
             results, attributes);
}

ffi::Error ExecuteInGroup(Communicators communicators, cudaStream_t stream, int32_t device,
                          Bf16Matrix x, Ids expert_idx, RouteWeights expert_weight,
                          Bf16Experts w_gate, Bf16Experts w_up, Bf16Experts w_down,
                          ffi::RemainingArgs others, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return RunLayerInGroup(communicators, device, attributes, [&](const GroupCall& group) {
    return Run(stream, device, &group, {x, expert_idx, expert_weight, w_gate, w_up, w_down}, others,
               results, attributes);
  });
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, PrepareLayer,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());

template <typename Binding>
auto WithOperands(Binding&& binding) {
  return WithLayerOperands(WithDevice(std::move(binding)))
      .RemainingArgs()  // perhaps biases
      .RemainingRets()
      .Attrs();
}
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute, WithOperands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(GroupHandler, ExecuteInGroup,
                       WithOperands(ffi::Ffi::Bind().Ctx<CollectivesContext>()));

}  // namespace

XLA_FFI_Error* PrepareForward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteForward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }
XLA_FFI_Error* ExecuteGroupForward(XLA_FFI_CallFrame* frame) { return GroupHandler(frame); }

}  // namespace megamoe
