#include "ffi/backward_fp8.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/backward_call.h"
#include "ffi/codes.h"
#include "ffi/common.h"
#include "ffi/group.h"
#include "ffi/layer.h"
#include "host/backward_fp8.h"
#include "shared/fp8.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

constexpr char kPass[] = "backward_fp8";
struct Fp8Weights {
  const Codes& gate;             // [E/R, H, I]
  const Codes& gate_transposed;  // [E/R, I, H]
  const Scales& gate_scales;     // [E/R, H / 128, I / 128]
  const Codes& up;               // [E/R, H, I]
  const Codes& up_transposed;    // [E/R, I, H]
  const Scales& up_scales;       // [E/R, H / 128, I / 128]
  const Codes& down;             // [E/R, I, H]
  const Scales& down_scales;     // [E/R, I / 128, H / 128]
};

// Of the sizes of the call.
ffi::Error ReadWeights(const Fp8Weights& w, Fp8BackwardCall* call) {
  const int64_t E = call->plan.dims.experts_per_rank(), H = call->H, I = call->I;
  for (const ffi::Error& error :
       {CheckCodes(kPass, "w_gate", "natural", w.gate, E, H, I),
        CheckCodes(kPass, "w_gate", "transposed", w.gate_transposed, E, I, H),
        CheckScales(kPass, "w_gate", w.gate_scales, E, H, I),
        CheckCodes(kPass, "w_up", "natural", w.up, E, H, I),
        CheckCodes(kPass, "w_up", "transposed", w.up_transposed, E, I, H),
        CheckScales(kPass, "w_up", w.up_scales, E, H, I),
        CheckCodes(kPass, "w_down", "natural", w.down, E, I, H),
        CheckScales(kPass, "w_down", w.down_scales, E, I, H)}) {
    if (error.failure()) return error;
  }
  call->gate = {w.gate.untyped_data(), w.gate_transposed.untyped_data(),
                w.gate_scales.typed_data()};
  call->up = {w.up.untyped_data(), w.up_transposed.untyped_data(), w.up_scales.typed_data()};
  call->down = {w.down.untyped_data(), nullptr, w.down_scales.typed_data()};
  return ffi::Error::Success();
}

// Of the workspace, what the backward in bf16 has not: dy and dz in FP8 and, where g and u are
// computed again, x. What a rank shares with its peers lies elsewhere.
struct CodePool {
  const char* name;
  int64_t bytes;
  void** place;
};
std::vector<CodePool> CodePools(Fp8BackwardCall* call) {
  const int64_t T = call->plan.dims.T, P = call->pool_rows;
  const int64_t row_bytes = CodeRowBytes(call->H);
  const bool has_peers = call->plan.dims.R > 1;
  std::vector<CodePool> pools;
  if (!has_peers) pools.push_back({"dy_codes", T * row_bytes, &call->dy_codes});
  pools.push_back({"dy_code_pool", P * row_bytes, &call->dy_code_pool});
  pools.push_back({"dz_codes", P * CodeRowBytes(2 * call->I), &call->dz_codes});
  if (!MakesGateUp(*call)) return pools;
  if (!has_peers) pools.push_back({"x_codes", T * row_bytes, &call->x_codes});
  pools.push_back({"x_code_pool", P * row_bytes, &call->x_code_pool});
  return pools;
}

ffi::Error ReadResults(ffi::RemainingRets& results, Fp8BackwardCall* call) {
  const std::vector<CodePool> pools = CodePools(call);
  const auto first = ReadBackwardResults(kPass, results, static_cast<int>(pools.size()), call);
  if (first.has_error()) return first.error();
  int at = *first;
  for (const CodePool& pool : pools) {
    const auto data = ReadResult<ffi::U8>(results, at++, pool.name, pool.bytes);
    if (data.has_error()) return data.error();
    *pool.place = *data;
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<Fp8BackwardCall> ReadCall(const Bf16Matrix& dy, const TokenOperands& tokens,
                                       const Fp8Weights& weights, int num_ranks,
                                       ffi::RemainingArgs& others, ffi::RemainingRets& results,
                                       const ffi::Dictionary& attributes) {
  if (ffi::Error error = CheckRank(kPass, "w_gate.natural", weights.gate); error.failure()) {
    return error;
  }
  const ffi::Span<const int64_t> sizes = weights.gate.dimensions();
  const auto layer =
      ReadTokenCall(kPass, kBackwardParts, tokens, {sizes[0], sizes[1], sizes[2], kFp8Group},
                    num_ranks, attributes);
  if (layer.has_error()) return layer.error();
  Fp8BackwardCall call = {};
  static_cast<LayerCall&>(call) = *layer;
  if (ffi::Error error =
          CheckShape(kPass, "dy", dy.dimensions(), {call.plan.dims.T, int64_t{call.H}});
      error.failure()) {
    return error;
  }
  const auto has_biases = attributes.get<int64_t>("biases");
  if (has_biases.has_error()) return has_biases.error();
  if (*has_biases != 0 || IsGeneral(call.unit, call.biases)) {
    return Invalid(std::string(kPass) + ": the attributes are not those of swiglu without biases");
  }
  if (ffi::Error error = ReadWeights(weights, &call); error.failure()) return error;
  if (ffi::Error error = ReadGateUp(kPass, others, attributes, &call); error.failure()) {
    return error;
  }
  if (ffi::Error error = ReadResults(results, &call); error.failure()) return error;
  call.dy = dy.untyped_data();
  call.x = tokens.x.untyped_data();
  return call;
}

// group: null for one rank.
ffi::Error Run(cudaStream_t stream, int32_t device, const GroupCall* group, const Bf16Matrix& dy,
               const TokenOperands& tokens, const Fp8Weights& weights, ffi::RemainingArgs& others,
               ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  const auto deadline_ns = ReadDeadline(attributes);
  if (deadline_ns.has_error()) return deadline_ns.error();
  const int num_ranks = group == nullptr ? 1 : group->peers.num_ranks;
  auto call = ReadCall(dy, tokens, weights, num_ranks, others, results, attributes);
  if (call.has_error()) return call.error();
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  SetPeers(device, *deadline_ns, group, &*call);
  if (group != nullptr) {
    call->x_codes = call->peers.x_codes[group->peers.rank];
    call->dy_codes = call->peers.dy_codes[group->peers.rank];
  }
  return FromCuda(RunFp8Backward(stream, *call));
}

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix dy, Bf16Matrix x, Ids expert_idx,
                   RouteWeights expert_weight, Codes gate, Codes gate_transposed,
                   Scales gate_scales, Codes up, Codes up_transposed, Scales up_scales, Codes down,
                   Scales down_scales, ffi::RemainingArgs others, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  return Run(stream, device, nullptr, dy, {x, expert_idx, expert_weight},
             {gate, gate_transposed, gate_scales, up, up_transposed, up_scales, down, down_scales},
             others, results, attributes);
}

ffi::Error ExecuteInGroup(Communicators communicators, cudaStream_t stream, int32_t device,
                          Bf16Matrix dy, Bf16Matrix x, Ids expert_idx, RouteWeights expert_weight,
                          Codes gate, Codes gate_transposed, Scales gate_scales, Codes up,
                          Codes up_transposed, Scales up_scales, Codes down, Scales down_scales,
                          ffi::RemainingArgs others, ffi::RemainingRets results,
                          ffi::Dictionary attributes) {
  return RunLayerInGroup(communicators, device, attributes, [&](const GroupCall& group) {
    return Run(
        stream, device, &group, dy, {x, expert_idx, expert_weight},
        {gate, gate_transposed, gate_scales, up, up_transposed, up_scales, down, down_scales},
        others, results, attributes);
  });
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, PrepareLayer,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());

template <typename Binding>
auto WithOperands(Binding&& binding) {
  return WithTokenOperands(WithDevice(std::move(binding)).template Arg<Bf16Matrix>())  // dy
      .template Arg<Codes>()                                                           // of w_gate
      .template Arg<Codes>()
      .template Arg<Scales>()
      .template Arg<Codes>()  // of w_up
      .template Arg<Codes>()
      .template Arg<Scales>()
      .template Arg<Codes>()  // of w_down
      .template Arg<Scales>()
      .RemainingArgs()  // perhaps what the forward kept
      .RemainingRets()
      .Attrs();
}
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute, WithOperands(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(GroupHandler, ExecuteInGroup,
                       WithOperands(ffi::Ffi::Bind().Ctx<CollectivesContext>()));

}  // namespace

XLA_FFI_Error* PrepareFp8Backward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteFp8Backward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }
XLA_FFI_Error* ExecuteGroupFp8Backward(XLA_FFI_CallFrame* frame) { return GroupHandler(frame); }

}  // namespace megamoe
