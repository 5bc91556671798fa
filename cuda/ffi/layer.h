// What the handlers of the forward and of the backward share: the refusals before a launch, and the
// part of a call that both read alike.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <initializer_list>
#include <utility>

#include "ffi/group.h"
#include "host/layer.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

using Bf16Matrix = xla::ffi::Buffer<xla::ffi::BF16, 2>;
using Ids = xla::ffi::Buffer<xla::ffi::S32, 2>;
using RouteWeights = xla::ffi::Buffer<xla::ffi::F32, 2>;
using Bf16Experts = xla::ffi::Buffer<xla::ffi::BF16, 3>;
using ExpertBias = xla::ffi::Buffer<xla::ffi::F32, 2>;

// The prepare stage, before anything is launched, on every rank alike: no peer is left waiting.
xla::ffi::Error PrepareLayer(xla::ffi::RemainingArgs, xla::ffi::RemainingRets,
                             xla::ffi::Dictionary attributes);

// What a call of either pass gets, whatever its weights are.
struct TokenOperands {
  const Bf16Matrix& x;                // [T, H]
  const Ids& expert_idx;              // [T, K]
  const RouteWeights& expert_weight;  // [T, K]
};
struct LayerOperands : TokenOperands {
  const Bf16Experts& w_gate;  // [E/R, H, I]
  const Bf16Experts& w_up;    // [E/R, H, I]
  const Bf16Experts& w_down;  // [E/R, I, H]
};

// The sizes, the routing and the attributes of a call of the `pass` whose launches do `pass_parts`.
// Refuses operands whose shapes do not go together. What is left for the caller: the number of
// steps of the plan, the results, with ReadLayerResults, and LayerCall::wait.
xla::ffi::ErrorOr<LayerCall> ReadLayerCall(const char* pass, int64_t pass_parts,
                                           const LayerOperands& operands, int num_ranks,
                                           const xla::ffi::Dictionary& attributes);

// The same of a call with weights of another kind, of so many experts of a rank; of H and I the
// kernels take multiples of `multiple`.
struct WeightSizes {
  int64_t E, H, I;
  int64_t multiple;
};
xla::ffi::ErrorOr<LayerCall> ReadTokenCall(const char* pass, int64_t pass_parts,
                                           const TokenOperands& operands, const WeightSizes& sizes,
                                           int num_ranks, const xla::ffi::Dictionary& attributes);

// The biases of the experts, where the attribute `biases` says that there are some: the first
// kNumBiases of the other operands.
xla::ffi::Error ReadBiases(const char* pass, xla::ffi::RemainingArgs& others,
                           const xla::ffi::Dictionary& attributes, LayerCall* call);
constexpr int kNumBiases = 3;

// The bytes that each rank shares with its peers, by the attributes of a call over several ranks.
xla::ffi::ErrorOr<int64_t> ReadPeerBytes(const xla::ffi::Dictionary& attributes);

// run(group) as a call of the group that the attributes name.
template <typename F>
xla::ffi::Error RunLayerInGroup(Communicators& communicators, int32_t device,
                                const xla::ffi::Dictionary& attributes, F run) {
  const auto group = ReadGroup(attributes);
  if (group.has_error()) return group.error();
  const auto bytes = ReadPeerBytes(attributes);
  if (bytes.has_error()) return bytes.error();
  return RunInGroup(communicators, device, *group, *bytes, run);
}

// Behind the contexts of their own, what both passes and their calls in a group bind alike.
template <typename Binding>
auto WithDevice(Binding&& binding) {
  return std::move(binding)
      .template Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<xla::ffi::DeviceOrdinal>();
}
template <typename Binding>
auto WithTokenOperands(Binding&& binding) {
  return std::move(binding)
      .template Arg<Bf16Matrix>()     // x
      .template Arg<Ids>()            // expert_idx
      .template Arg<RouteWeights>();  // expert_weight
}
template <typename Binding>
auto WithLayerOperands(Binding&& binding) {
  return WithTokenOperands(std::move(binding))
      .template Arg<Bf16Experts>()   // w_gate
      .template Arg<Bf16Experts>()   // w_up
      .template Arg<Bf16Experts>();  // w_down
}

// Gives a call its waits and, in a group of several ranks, its peers; `group` is null for one rank.
void SetPeers(int32_t device, int64_t deadline_ns, const GroupCall* group, LayerCall* call);

// Refuses an operand that is not of `sizes`.
xla::ffi::Error CheckShape(const char* pass, const char* name, xla::ffi::Span<const int64_t> found,
                           std::initializer_list<int64_t> sizes);

// The deadline of the waits of a call.
xla::ffi::ErrorOr<int64_t> ReadDeadline(const xla::ffi::Dictionary& attributes);

// Whether the forward keeps g and u, and the backward takes them.
xla::ffi::ErrorOr<int64_t> ReadKeepsGateUp(const xla::ffi::Dictionary& attributes);

// Fills the plan's arrays, which begin at result `first_plan`, and the trace, which is result
// `trace` if there are so many.
xla::ffi::Error ReadLayerResults(xla::ffi::RemainingRets& results, int first_plan, size_t trace,
                                 LayerCall* call);

#ifdef MEGAMOE_DELAYS
// Fills every result with 0xff, NaN in bf16 and float32: who reads what this call has not written
// is found.
xla::ffi::Error Poison(cudaStream_t stream, const xla::ffi::RemainingRets& results);
#endif

}  // namespace megamoe
