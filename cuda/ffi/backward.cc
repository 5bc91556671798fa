#include "ffi/backward.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "ffi/group.h"
#include "ffi/layer.h"
#include "host/backward.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

// Steps of a plan with weight gradients and without.
constexpr int kAllSteps = 4;
constexpr int kDataSteps = 2;
// dx and dw; then the gradients of w_gate, w_up and w_down, if the plan has steps for them, and
// with biases theirs.
constexpr int kDataGradients = 2;
constexpr int kWeightGradients = 3;
constexpr int64_t kParts =
    kDispatch | kDgradDown | kDgradGateUp | kCombine | kWgradDown | kWgradGateUp | kFinish;

// The weight gradients are of one dtype, float32 or bf16, which the first of them says.
ffi::Error ReadWeightGradients(ffi::RemainingRets& results, int64_t elements, BackwardCall* call) {
  const auto first = results.get<ffi::AnyBuffer>(kDataGradients);
  if (first.has_error()) return first.error();
  call->float_gradients = (*first)->element_type() == ffi::F32;
  if (!call->float_gradients && MaxPasses(call->plan) > 1) {
    return Invalid(
        "backward: weight gradients of several passes are float32, which dw_gate is not");
  }
  void** const places[kWeightGradients] = {&call->dw_gate, &call->dw_up, &call->dw_down};
  const char* const names[kWeightGradients] = {"dw_gate", "dw_up", "dw_down"};
  for (int i = 0; i < kWeightGradients; ++i) {
    const int at = kDataGradients + i;
    const auto data = call->float_gradients
                          ? ReadResult<ffi::F32>(results, at, names[i], elements)
                          : ReadResult<ffi::BF16>(results, at, names[i], elements);
    if (data.has_error()) return data.error();
    *places[i] = *data;
  }
  return ffi::Error::Success();
}

ffi::Error ReadBiasGradients(ffi::RemainingRets& results, BackwardCall* call) {
  const int64_t experts = call->plan.dims.experts_per_rank();
  const struct {
    const char* name;
    int64_t columns;
    float** place;
  } gradients[kNumBiases] = {{"db_gate", call->I, &call->dbiases.gate},
                             {"db_up", call->I, &call->dbiases.up},
                             {"db_down", call->H, &call->dbiases.down}};
  int at = kDataGradients + kWeightGradients;
  for (const auto& gradient : gradients) {
    const auto data =
        ReadResult<ffi::F32>(results, at++, gradient.name, experts * gradient.columns);
    if (data.has_error()) return data.error();
    *gradient.place = static_cast<float*>(*data);
  }
  return ffi::Error::Success();
}

// The pools and counters, from result `first` on, and with biases what they need of each row.
ffi::Error ReadWorkspace(ffi::RemainingRets& results, int first, BackwardCall* call) {
  const int64_t P = call->pool_rows;
  const struct {
    const char* name;
    int64_t elements;
    void** place;
  } pools[] = {
      {"x_pool", P * call->H, &call->x_pool}, {"dy_pool", P * call->H, &call->dy_pool},
      {"dg", P * call->I, &call->dg},         {"du", P * call->I, &call->du},
      {"wh", P * call->I, &call->wh},         {"dx_pool", P * call->H, &call->dx_pool},
  };
  int at = first;
  for (const auto& pool : pools) {
    const auto data = ReadResult<ffi::BF16>(results, at++, pool.name, pool.elements);
    if (data.has_error()) return data.error();
    *pool.place = *data;
  }
  const auto dw_partial =
      ReadResult<ffi::F32>(results, at++, "dw_partial", P * NumDgradDownTiles(call->I));
  if (dw_partial.has_error()) return dw_partial.error();
  const auto counters = ReadResult<ffi::S32>(
      results, at++, "counters", NumBackwardCounters(P, call->plan.dims.experts_per_rank()));
  if (counters.has_error()) return counters.error();
  call->dw_partial = static_cast<float*>(*dw_partial);
  call->counters = static_cast<uint32_t*>(*counters);
  if (call->biases.down == nullptr) return ffi::Error::Success();
  const auto bias_rows = ReadResult<ffi::F32>(results, at, "bias_rows", 2 * P);
  if (bias_rows.has_error()) return bias_rows.error();
  call->bias_rows = static_cast<float2*>(*bias_rows);
  return ffi::Error::Success();
}
constexpr int kWorkspaceResults = 8;

ffi::Error ReadResults(ffi::RemainingRets& results, BackwardCall* call) {
  const RoutingDims& d = call->plan.dims;
  const int num_steps = call->plan.num_steps;
  if (num_steps != kAllSteps && num_steps != kDataSteps) {
    return Invalid("backward: attribute steps has " + std::to_string(num_steps) +
                   " steps; it has 2, or 4 with weight gradients");
  }
  const bool has_biases = call->biases.down != nullptr;
  int first_plan = kDataGradients;
  if (num_steps == kAllSteps) {
    first_plan += kWeightGradients;
    const int64_t elements = int64_t{d.experts_per_rank()} * call->H * call->I;
    if (ffi::Error error = ReadWeightGradients(results, elements, call); error.failure()) {
      return error;
    }
    if (has_biases) {
      first_plan += kNumBiases;
      if (ffi::Error error = ReadBiasGradients(results, call); error.failure()) return error;
    }
  }
  const int first_pool = first_plan + kNumPlanResults;
  const size_t trace = static_cast<size_t>(first_pool + kWorkspaceResults + has_biases);
  if (ffi::Error error = ReadLayerResults(results, first_plan, trace, call); error.failure()) {
    return error;
  }
  if (ffi::Error error = ReadWorkspace(results, first_pool, call); error.failure()) return error;
  const auto dx = ReadResult<ffi::BF16>(results, 0, "dx", int64_t{d.T} * call->H);
  if (dx.has_error()) return dx.error();
  const auto dw = ReadResult<ffi::F32>(results, 1, "dw", int64_t{d.T} * d.K);
  if (dw.has_error()) return dw.error();
  call->dx = *dx;
  call->dw = static_cast<float*>(*dw);
  return ffi::Error::Success();
}

// What the forward kept is one more operand, the last, behind the biases.
ffi::Error ReadGateUp(ffi::RemainingArgs& operands, const ffi::Dictionary& attributes,
                      BackwardCall* call) {
  const auto takes_gate_up = ReadKeepsGateUp(attributes);
  if (takes_gate_up.has_error()) return takes_gate_up.error();
  if (*takes_gate_up == 0) return ffi::Error::Success();
  const auto gate_up = operands.get<Bf16Matrix>(call->biases.down != nullptr ? kNumBiases : 0);
  if (gate_up.has_error()) return gate_up.error();
  call->gate_up = gate_up->untyped_data();
  return CheckShape("backward", "gate_up", gate_up->dimensions(), {call->pool_rows, 2 * call->I});
}

// group: null for one rank.
ffi::Error Run(cudaStream_t stream, int32_t device, const GroupCall* group, const Bf16Matrix& dy,
               const LayerOperands& operands, ffi::RemainingArgs& others,
               ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  const int num_ranks = group == nullptr ? 1 : group->peers.num_ranks;
  const auto layer = ReadLayerCall("backward", kParts, operands, num_ranks, attributes);
  if (layer.has_error()) return layer.error();
  const int64_t T = layer->plan.dims.T;
  if (ffi::Error error = CheckShape("backward", "dy", dy.dimensions(), {T, layer->H});
      error.failure()) {
    return error;
  }
  const auto deadline_ns = ReadDeadline(attributes);
  if (deadline_ns.has_error()) return deadline_ns.error();
  BackwardCall call = {};
  static_cast<LayerCall&>(call) = *layer;
  if (ffi::Error error = ReadBiases("backward", others, attributes, &call); error.failure()) {
    return error;
  }
  if (ffi::Error error = ReadGateUp(others, attributes, &call); error.failure()) return error;
  if (ffi::Error error = ReadResults(results, &call); error.failure()) return error;
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
