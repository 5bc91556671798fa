#include "ffi/forward.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "host/forward.h"
#include "shared/forward.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using Bf16Matrix = ffi::Buffer<ffi::BF16, 2>;
using Ids = ffi::Buffer<ffi::S32, 2>;
using Weights = ffi::Buffer<ffi::F32, 2>;
using Bf16Experts = ffi::Buffer<ffi::BF16, 3>;

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
  const ffi::ErrorOr<int64_t> keep_gate_up = attributes.get<int64_t>("keep_gate_up");
  if (ranks.has_error()) return ranks.error();
  if (keep_gate_up.has_error()) return keep_gate_up.error();
  if (*keep_gate_up != 0) {
    return MakeError(ffi::ErrorCode::kUnimplemented,
                     "the kernels of this version do not keep g and u; call with save=\"none\", or "
                     "with backend=\"reference\"");
  }
  if (*ranks == 1) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kUnimplemented,
                   "the kernels of this version hold all experts on one GPU; for experts over " +
                       std::to_string(*ranks) + " GPUs call with backend=\"reference\"");
}

std::string Text(ffi::Span<const int64_t> sizes) {
  std::string text = "[";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  return text + "]";
}

template <typename Buffer>
ffi::Error CheckShape(const char* name, const Buffer& operand, std::vector<int64_t> sizes) {
  const ffi::Span<const int64_t> found = operand.dimensions();
  if (std::equal(found.begin(), found.end(), sizes.begin(), sizes.end())) {
    return ffi::Error::Success();
  }
  return Invalid(std::string("forward: operand ") + name + " is " + Text(found) +
                 "; it goes with " + Text(ffi::Span<const int64_t>(sizes.data(), sizes.size())));
}

// What the kernel's two steps and its parts allow.
ffi::Error CheckAttributes(const PlanProblem& plan, ffi::Span<const int64_t> launches, int64_t H,
                           int64_t I) {
  constexpr int64_t kMultiple = 64;
  constexpr int64_t kAllParts = kDispatch | kGateUp | kDown | kCombine;
  if (H % kMultiple != 0 || I % kMultiple != 0) {
    return Invalid("forward: H is " + std::to_string(H) + " and I " + std::to_string(I) +
                   "; both may be multiples of 64");
  }
  if (plan.num_steps != 2) return Invalid("forward: attribute steps is not that of two steps");
  for (const int64_t parts : launches) {
    if (parts < 1 || parts > kAllParts) {
      return Invalid("forward: attribute launches holds " + std::to_string(parts) +
                     "; a launch does parts 1 to 15");
    }
  }
  return ffi::Error::Success();
}

// B is computed in jax_megamoe/config.py; the kernel walks a tree of at most 8 blocks.
bool IsBlockCount(int64_t num_blocks, int64_t experts) {
  return num_blocks >= 1 && num_blocks <= 8 && (num_blocks & (num_blocks - 1)) == 0 &&
         experts % num_blocks == 0;
}

#ifdef MEGAMOE_DELAYS
// Fills every result with 0xff, NaN in bf16: who reads what this call has not written is found.
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

ffi::Error Execute(cudaStream_t stream, int32_t device, Bf16Matrix x, Ids expert_idx,
                   Weights expert_weight, Bf16Experts w_gate, Bf16Experts w_up, Bf16Experts w_down,
                   ffi::RemainingRets results, ffi::Dictionary attributes) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  const auto steps = attributes.get<ffi::Span<const int64_t>>("steps");
  const auto num_blocks = attributes.get<int64_t>("num_blocks");
  const auto launches = attributes.get<ffi::Span<const int64_t>>("launches");
  const auto deadline_ns = attributes.get<int64_t>("deadline_ns");
  if (steps.has_error()) return steps.error();
  if (num_blocks.has_error()) return num_blocks.error();
  if (launches.has_error()) return launches.error();
  if (deadline_ns.has_error()) return deadline_ns.error();
  const int64_t experts = w_gate.dimensions()[0];
  if (!IsBlockCount(*num_blocks, experts)) {
    return Invalid("forward: attribute num_blocks is " + std::to_string(*num_blocks) + " for " +
                   std::to_string(experts) + " experts; it may be 1, 2, 4 or 8 and divides them");
  }
  const int64_t routing[3] = {1, expert_idx.dimensions()[0], expert_idx.dimensions()[1]};
  const ffi::ErrorOr<PlanProblem> plan =
      ReadPlanProblem(ffi::Span<const int64_t>(routing, 3), experts, 0, *steps);
  if (plan.has_error()) return plan.error();
  const ffi::ErrorOr<PlanArrays> arrays = ReadPlanArrays(*plan, results, 1);
  if (arrays.has_error()) return arrays.error();
  const int64_t T = routing[1];
  const int64_t H = x.dimensions()[1];
  const int64_t I = w_gate.dimensions()[2];
  for (const ffi::Error& error :
       {CheckShape("x", x, {T, H}), CheckShape("expert_weight", expert_weight, {T, routing[2]}),
        CheckShape("w_gate", w_gate, {experts, H, I}), CheckShape("w_up", w_up, {experts, H, I}),
        CheckShape("w_down", w_down, {experts, I, H}), CheckAttributes(*plan, *launches, H, I)}) {
    if (error.failure()) return error;
  }
  const int64_t pool_rows = PlanFields(*plan)[3].elements;
  constexpr int kFirst = 1 + kNumPlanResults;
  const ffi::ErrorOr<void*> y = ReadResult<ffi::BF16>(results, 0, "y", T * H);
  const ffi::ErrorOr<void*> pool = ReadResult<ffi::BF16>(results, kFirst, "pool", pool_rows * H);
  const ffi::ErrorOr<void*> h = ReadResult<ffi::BF16>(results, kFirst + 1, "h", pool_rows * I);
  const ffi::ErrorOr<void*> counters =
      ReadResult<ffi::S32>(results, kFirst + 2, "counters", NumForwardCounters(pool_rows));
  for (const auto* pointer : {&y, &pool, &h, &counters}) {
    if (pointer->has_error()) return pointer->error();
  }
  const ffi::ErrorOr<TraceBuffer> trace = ReadTrace(results, kFirst + 3);
  if (trace.has_error()) return trace.error();
#ifdef MEGAMOE_DELAYS
  if (ffi::Error error = Poison(stream, results); error.failure()) return error;
#endif
  ForwardCall call = {};
  call.plan = *plan;
  call.plan_arrays = *arrays;
  call.H = static_cast<int>(H);
  call.I = static_cast<int>(I);
  call.num_blocks = static_cast<int>(*num_blocks);
  call.pool_rows = pool_rows;
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
  call.wait = NextCall(device, /*rank=*/0, static_cast<uint64_t>(*deadline_ns));
  call.trace = *trace;
  return FromCuda(RunForward(stream, call, launches->begin(), launches->size()));
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, Prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets().Attrs());
XLA_FFI_DEFINE_HANDLER(ExecuteHandler, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
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
