#include "ffi/forward.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "host/forward.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using Bf16Matrix = ffi::Buffer<ffi::BF16, 2>;
using Ids = ffi::Buffer<ffi::S32, 2>;
using Weights = ffi::Buffer<ffi::F32, 2>;
using Bf16Experts = ffi::Buffer<ffi::BF16, 3>;

template <typename Buffer>
ffi::ErrorOr<void*> ResultData(ffi::RemainingRets& results, int i) {
  const auto result = results.get<Buffer>(i);
  if (result.has_error()) return result.error();
  return (*result)->untyped_data();
}

// The trace is an extra last result, int32 [1 + records, 4], which most calls do not ask for.
ffi::ErrorOr<TraceBuffer> ReadTrace(ffi::RemainingRets& results, size_t i) {
  if (results.size() <= i) return TraceBuffer{};
  const auto result = results.get<ffi::Buffer<ffi::S32, 2>>(i);
  if (result.has_error()) return result.error();
  const auto sizes = (*result)->dimensions();
  if (sizes[0] < 1 || sizes[1] * sizeof(int32_t) != sizeof(TraceRecord)) {
    return Invalid("forward: a trace has at least one row, of 4 numbers");
  }
  return TraceBuffer{static_cast<TraceRecord*>((*result)->untyped_data()),
                     static_cast<uint32_t>(sizes[0] - 1)};
}

// Before anything is launched, on every rank alike: no peer is left waiting.
ffi::Error Prepare(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<int64_t> ranks = attributes.get<int64_t>("R");
  if (ranks.has_error()) return ranks.error();
  if (*ranks == 1) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kUnimplemented,
                   "the kernels of this version hold all experts on one GPU; for experts over " +
                       std::to_string(*ranks) + " GPUs call with backend=\"reference\"");
}

ffi::Error Execute(cudaStream_t stream, Bf16Matrix x, Ids expert_idx, Weights expert_weight,
                   Bf16Experts w_gate, Bf16Experts w_up, Bf16Experts w_down,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  const auto steps = attributes.get<ffi::Span<const int64_t>>("steps");
  const auto launches = attributes.get<ffi::Span<const int64_t>>("launches");
  if (steps.has_error()) return steps.error();
  if (launches.has_error()) return launches.error();
  const int64_t experts = w_gate.dimensions()[0];
  const int64_t routing[3] = {1, expert_idx.dimensions()[0], expert_idx.dimensions()[1]};
  const ffi::ErrorOr<PlanProblem> plan =
      ReadPlanProblem(ffi::Span<const int64_t>(routing, 3), experts, 0, *steps);
  if (plan.has_error()) return plan.error();
  const ffi::ErrorOr<PlanArrays> arrays = ReadPlanArrays(*plan, results, 1);
  if (arrays.has_error()) return arrays.error();
  const ffi::ErrorOr<void*> y = ResultData<Bf16Matrix>(results, 0);
  const ffi::ErrorOr<void*> pool = ResultData<Bf16Matrix>(results, kNumPlanResults + 1);
  const ffi::ErrorOr<void*> h = ResultData<Bf16Matrix>(results, kNumPlanResults + 2);
  const ffi::ErrorOr<void*> counters =
      ResultData<ffi::Buffer<ffi::S32, 1>>(results, kNumPlanResults + 3);
  for (const auto* pointer : {&y, &pool, &h, &counters}) {
    if (pointer->has_error()) return pointer->error();
  }
  const ffi::ErrorOr<TraceBuffer> trace = ReadTrace(results, kNumPlanResults + 4);
  if (trace.has_error()) return trace.error();
  ForwardCall call = {};
  call.plan = *plan;
  call.plan_arrays = *arrays;
  call.H = static_cast<int>(x.dimensions()[1]);
  call.I = static_cast<int>(w_gate.dimensions()[2]);
  call.pool_rows = PlanFields(*plan)[3].elements;
  call.x = x.untyped_data();
  call.expert_idx = expert_idx.typed_data();
  call.expert_weight = expert_weight.typed_data();
  call.w_gate = w_gate.untyped_data();
  call.w_up = w_up.untyped_data();
  call.w_down = w_down.untyped_data();
  call.y = *y;
  call.pool = *pool;
  call.h = *h;
  call.counters = static_cast<uint32_t*>(*counters);
  call.trace = *trace;
  return FromCuda(RunForward(stream, call, launches->begin(), launches->size()));
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, Prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<Bf16Matrix>()   // x
                           .Arg<Ids>()          // expert_idx
                           .Arg<Weights>()      // expert_weight
                           .Arg<Bf16Experts>()  // w_gate
                           .Arg<Bf16Experts>()  // w_up
                           .Arg<Bf16Experts>()  // w_down
                           .RemainingRets()
                           .Attrs());

}  // namespace

XLA_FFI_Error* PrepareForward(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }
XLA_FFI_Error* ExecuteForward(XLA_FFI_CallFrame* frame) { return ExecuteHandler(frame); }

}  // namespace megamoe
