#include "ffi/backward_call.h"

#include <cstdint>
#include <string>

#include "ffi/arguments.h"
#include "ffi/layer.h"
#include "shared/plan.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

// Steps of a plan with weight gradients and without.
constexpr int kAllSteps = 4;
constexpr int kDataSteps = 2;
// dx and dw; then the gradients of w_gate, w_up and w_down, if the plan has steps for them, and
// with biases theirs.
constexpr int kDataGradients = 2;
constexpr int kWeightGradients = 3;

// The weight gradients are of one dtype, float32 or bf16, which the first of them says.
ffi::Error ReadWeightGradients(const char* pass, ffi::RemainingRets& results, int64_t elements,
                               BackwardCall* call) {
  const auto first = results.get<ffi::AnyBuffer>(kDataGradients);
  if (first.has_error()) return first.error();
  call->float_gradients = (*first)->element_type() == ffi::F32;
  if (!call->float_gradients && MaxPasses(call->plan) > 1) {
    return Invalid(std::string(pass) +
                   ": weight gradients of several passes are float32, which dw_gate is not");
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

}  // namespace

ffi::ErrorOr<int> ReadBackwardResults(const char* pass, ffi::RemainingRets& results, int num_others,
                                      BackwardCall* call) {
  const RoutingDims& d = call->plan.dims;
  const int num_steps = call->plan.num_steps;
  if (num_steps != kAllSteps && num_steps != kDataSteps) {
    return Invalid(std::string(pass) + ": attribute steps has " + std::to_string(num_steps) +
                   " steps; it has 2, or 4 with weight gradients");
  }
  const bool has_biases = call->biases.down != nullptr;
  int first_plan = kDataGradients;
  if (num_steps == kAllSteps) {
    first_plan += kWeightGradients;
    const int64_t elements = int64_t{d.experts_per_rank()} * call->H * call->I;
    if (ffi::Error error = ReadWeightGradients(pass, results, elements, call); error.failure()) {
      return error;
    }
    if (has_biases) {
      first_plan += kNumBiases;
      if (ffi::Error error = ReadBiasGradients(results, call); error.failure()) return error;
    }
  }
  const int first_pool = first_plan + kNumPlanResults;
  const int first_other = first_pool + kWorkspaceResults + has_biases;
  const size_t trace = static_cast<size_t>(first_other + num_others);
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
  return first_other;
}

ffi::Error ReadGateUp(const char* pass, ffi::RemainingArgs& operands,
                      const ffi::Dictionary& attributes, BackwardCall* call) {
  const auto takes_gate_up = ReadKeepsGateUp(attributes);
  if (takes_gate_up.has_error()) return takes_gate_up.error();
  if (*takes_gate_up == 0) return ffi::Error::Success();
  const auto gate_up = operands.get<Bf16Matrix>(call->biases.down != nullptr ? kNumBiases : 0);
  if (gate_up.has_error()) return gate_up.error();
  call->gate_up = gate_up->untyped_data();
  return CheckShape(pass, "gate_up", gate_up->dimensions(), {call->pool_rows, 2 * call->I});
}

}  // namespace megamoe
