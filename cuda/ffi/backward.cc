#include "ffi/backward.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "ffi/backward_call.h"
#include "ffi/common.h"
#include "ffi/group.h"
#include "ffi/layer.h"
#include "host/backward.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

constexpr char kPass[] = "backward";

// group: null for one rank.
ffi::Error Run(cudaStream_t stream, int32_t device, const GroupCall* group, const Bf16Matrix& dy,
               const LayerOperands& operands, ffi::RemainingArgs& others,
               ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  const int num_ranks = group == nullptr ? 1 : group->peers.num_ranks;
  const auto layer = ReadLayerCall(kPass, kBackwardParts, operands, num_ranks, attributes);
  if (layer.has_error()) return layer.error();
  const int64_t T = layer->plan.dims.T;
  if (ffi::Error error = CheckShape(kPass, "dy", dy.dimensions(), {T, layer->H}); error.failure()) {
    return error;
  }
  const auto deadline_ns = ReadDeadline(attributes);
  if (deadline_ns.has_error()) return deadline_ns.error();
  BackwardCall call = {};
  static_cast<LayerCall&>(call) = *layer;
  if (ffi::Error error = ReadBiases(kPass, others, attributes, &call); error.failure()) {
    return error;
  }
  if (ffi::Error error = ReadGateUp(kPass, others, attributes, &call); error.failure()) {
    return error;
  }
  const auto others_begin = ReadBackwardResults(kPass, results, 0, &call);
  if (others_begin.has_error()) return others_begin.error();
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  call.dy = dy.untyped_data();
  call.x = operands.x.untyped_data();
  call.w_gate = operands.w_gate.untyped_data();
  call.w_up = operands.w_up.untyped_data();
  call.w_down = operands.w_down.untyped_data();
  SetPeers(device, *deadline_ns, group, &call);
  return FromCuda(RunBackward(stream, call));
}

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix dy, Bf16Matrix x, Ids expert_idx,
                   RouteWeights expert_weight, Bf16Experts w_gate, Bf16Experts w_up,
                   Bf16Experts w_down, ffi::RemainingArgs others, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  return Run(stream, device, nullptr, dy, {x, expert_idx, expert_weight, w_gate, w_up, w_down},
             others, results, attributes);
}

ffi::Error ExecuteInGroup(Communicators communicators, cudaStream_t stream, int32_t device,
                          Bf16Matrix dy, Bf16Matrix x, Ids expert_idx, RouteWeights expert_weight,
                          Bf16Experts w_gate, Bf16Experts w_up, Bf16Experts w_down,
                          ffi::RemainingArgs others, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return RunLayerInGroup(communicators, device, attributes, [&](const GroupCall& group) {
    return Run(stream, device, &group, dy, {x, expert_idx, expert_weight, w_gate, w_up, w_down},
               others, results, attributes);
  });
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, PrepareLayer,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());

template <typename Binding>
auto WithOperands(Binding&& binding) {
  return WithLayerOperands(WithDevice(std::move(binding)).template Arg<Bf16Matrix>())  // dy
      .RemainingArgs()  // perhaps biases, perhaps what the forward kept
      .RemainingRets()
      .Attrs();
}
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute, WithOperands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(GroupHandler, ExecuteInGroup,
                       WithOperands(ffi::Ffi::Bind().Ctx<CollectivesContext>()));

}  // namespace

XLA_FFI_Error* PrepareBackward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteBackward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }
XLA_FFI_Error* ExecuteGroupBackward(XLA_FFI_CallFrame* frame) { return GroupHandler(frame); }

}  // namespace megamoe
