#include "ffi/layer.h"

#include <string>

#include "ffi/arguments.h"
#include "ffi/common.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

// B is computed in jax_megamoe/config.py; the kernel walks a tree of at most 8 blocks.
bool IsBlockCount(int64_t num_blocks, int64_t experts) {
  return num_blocks >= 1 && num_blocks <= 8 && (num_blocks & (num_blocks - 1)) == 0 &&
         experts % num_blocks == 0;
}

// The trace is an extra last result, int32 [1 + records, 4], which most calls do not ask for.
ffi::ErrorOr<TraceBuffer> ReadTrace(ffi::RemainingRets& results, size_t i) {
  if (results.size() <= i) return TraceBuffer{};
  const auto result = results.get<ffi::Buffer<ffi::S32, 2>>(i);
  if (result.has_error()) return result.error();
  const auto sizes = (*result)->dimensions();
  if (sizes[0] < 1 || sizes[1] * sizeof(int32_t) != sizeof(TraceRecord)) {
    return Invalid("a trace has at least one row, of 4 numbers");
  }
  return TraceBuffer{static_cast<TraceRecord*>((*result)->untyped_data()),
                     static_cast<uint32_t>(sizes[0] - 1)};
}

}  // namespace

ffi::Error PrepareLayer(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<int64_t> ranks = attributes.get<int64_t>("R");
  if (ranks.has_error()) return ranks.error();
  if (*ranks == 1) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kUnimplemented,
                   "the kernels of this version hold all experts on one GPU; for experts over " +
                       std::to_string(*ranks) + " GPUs call with backend=\"reference\"");
}

ffi::ErrorOr<LayerCall> ReadLayerCall(const Ids& expert_idx, const RouteWeights& expert_weight,
                                      const Bf16Experts& w_gate,
                                      const ffi::Dictionary& attributes) {
  const auto steps = attributes.get<ffi::Span<const int64_t>>("steps");
  const auto num_blocks = attributes.get<int64_t>("num_blocks");
  const auto launches = attributes.get<ffi::Span<const int64_t>>("launches");
  if (steps.has_error()) return steps.error();
  if (num_blocks.has_error()) return num_blocks.error();
  if (launches.has_error()) return launches.error();
  const int64_t experts = w_gate.dimensions()[0];
  if (!IsBlockCount(*num_blocks, experts)) {
    return Invalid("attribute num_blocks is " + std::to_string(*num_blocks) + " for " +
                   std::to_string(experts) + " experts; it may be 1, 2, 4 or 8 and divides them");
  }
  const int64_t routing[3] = {1, expert_idx.dimensions()[0], expert_idx.dimensions()[1]};
  const ffi::ErrorOr<PlanProblem> plan =
      ReadPlanProblem(ffi::Span<const int64_t>(routing, 3), experts, 0, *steps);
  if (plan.has_error()) return plan.error();
  LayerCall call = {};
  call.plan = *plan;
  call.H = static_cast<int>(w_gate.dimensions()[1]);
  call.I = static_cast<int>(w_gate.dimensions()[2]);
  call.num_blocks = static_cast<int>(*num_blocks);
  call.pool_rows = PlanFields(*plan)[3].elements;
  call.expert_idx = expert_idx.typed_data();
  call.expert_weight = expert_weight.typed_data();
  call.launches = launches->begin();
  call.num_launches = static_cast<int64_t>(launches->size());
  return call;
}

ffi::ErrorOr<int64_t> ReadDeadline(const ffi::Dictionary& attributes) {
  return attributes.get<int64_t>("deadline_ns");
}

ffi::Error ReadLayerResults(ffi::RemainingRets& results, int first_plan, size_t trace,
                            LayerCall* call) {
  const ffi::ErrorOr<PlanArrays> arrays = ReadPlanArrays(call->plan, results, first_plan);
  if (arrays.has_error()) return arrays.error();
  const ffi::ErrorOr<TraceBuffer> buffer = ReadTrace(results, trace);
  if (buffer.has_error()) return buffer.error();
  call->plan_arrays = *arrays;
  call->trace = *buffer;
  return ffi::Error::Success();
}

#ifdef MEGAMOE_DELAYS
ffi::Error Poison(cudaStream_t stream, const ffi::RemainingRets& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    const cudaError_t error =
        cudaMemsetAsync((*result)->untyped_data(), 0xff, (*result)->size_bytes(), stream);
    if (error != cudaSuccess) return FromCuda({error, "cudaMemsetAsync"});
  }
  return ffi::Error::Success();
}
#endif

}  // namespace megamoe
