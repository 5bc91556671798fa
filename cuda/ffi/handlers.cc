#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "ffi/common.h"
#include "plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& text) {
  return MakeError(ffi::ErrorCode::kInvalidArgument, text);
}

// The limits are refused by name in jax_megamoe/plan.py; here they only keep memory safe.
bool InLimits(const PlanProblem& p, int64_t experts) {
  const RoutingDims& d = p.dims;
  return d.R > 0 && d.K > 0 && d.K <= kMaxChoices && experts > 0 && experts <= kMaxExperts &&
         d.E % d.R == 0 && p.rank >= 0 && p.rank < d.R;
}

ffi::ErrorOr<PlanProblem> ReadProblem(ffi::Span<const int64_t> idx_dims, int64_t experts,
                                      int64_t rank, ffi::Span<const int64_t> steps) {
  constexpr int kStepFields = 3;
  const int64_t num_steps = steps.size() / kStepFields;
  if (num_steps < 1 || num_steps > kMaxSteps || steps.size() % kStepFields != 0) {
    return Invalid("plan: attribute steps has " + std::to_string(steps.size()) +
                   " numbers; it takes 3 for each of 1 to 4 steps");
  }
  PlanProblem p = {};
  p.dims = {static_cast<int>(idx_dims[1]), static_cast<int>(idx_dims[2]), static_cast<int>(experts),
            static_cast<int>(idx_dims[0])};
  p.rank = static_cast<int>(rank);
  p.num_steps = static_cast<int>(num_steps);
  if (!InLimits(p, experts)) {
    return Invalid("plan: dimensions outside the limits of cuda/shared/plan.h");
  }
  for (int s = 0; s < p.num_steps; ++s) {
    const int64_t* fields = steps.begin() + s * kStepFields;
    p.steps[s] = {static_cast<int>(fields[0]), static_cast<int>(fields[1]),
                  static_cast<int>(fields[2])};
  }
  return p;
}

using ExpertIdx = ffi::Buffer<ffi::S32, 3>;  // [R, T, K]

ffi::Error ExecutePlan(cudaStream_t stream, ExpertIdx expert_idx, ffi::RemainingRets results,
                       int64_t experts, int64_t rank, ffi::Span<const int64_t> steps) {
  const ffi::ErrorOr<PlanProblem> problem =
      ReadProblem(expert_idx.dimensions(), experts, rank, steps);
  if (problem.has_error()) return problem.error();
  const auto fields = PlanFields(*problem);
  if (results.size() != fields.size()) return Invalid("plan: wrong number of results");
  void* pointers[std::tuple_size_v<decltype(fields)>];
  for (size_t i = 0; i < fields.size(); ++i) {
    const auto result = results.get<ffi::Buffer<ffi::S32>>(i);
    if (result.has_error()) return result.error();
    const int64_t elements = (*result)->element_count();
    if (elements != fields[i].elements) {
      return Invalid(std::string("plan: result ") + fields[i].name + " has " +
                     std::to_string(elements) + " elements, the kernel writes " +
                     std::to_string(fields[i].elements));
    }
    pointers[i] = (*result)->untyped_data();
  }
  const auto ints = [&](int i) { return static_cast<int32_t*>(pointers[i]); };
  const PlanArrays arrays = {ints(0),
                             ints(1),
                             ints(2),
                             ints(3),
                             static_cast<Item*>(pointers[4]),
                             ints(5),
                             ints(6),
                             static_cast<uint32_t*>(pointers[7])};
  return FromCuda(plan::Launch(stream, *problem, expert_idx.typed_data(), arrays));
}

// Before anything is launched, on every rank alike: no peer is left waiting.
ffi::Error Refuse() {
  return MakeError(ffi::ErrorCode::kUnimplemented,
                   "this build has no fused forward and backward kernels yet; call with "
                   "backend=\"reference\" or backend=\"auto\"");
}

XLA_FFI_DEFINE_HANDLER(kExecutePlan, ExecutePlan,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ExpertIdx>()
                           .RemainingRets()
                           .Attr<int64_t>("experts")
                           .Attr<int64_t>("rank")
                           .Attr<ffi::Span<const int64_t>>("steps"));
XLA_FFI_DEFINE_HANDLER(kRefusePrepare, Refuse, ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>());
XLA_FFI_DEFINE_HANDLER(kRefuseExecute, Refuse, ffi::Ffi::Bind());

}  // namespace

std::vector<Registration> LayerRegistrations() {
  return {
      {"jax_megamoe_plan", "initialize", kInitialize},
      {"jax_megamoe_plan", "execute", kExecutePlan},
      {"jax_megamoe_forward", "prepare", kRefusePrepare},
      {"jax_megamoe_forward", "initialize", kInitialize},
      {"jax_megamoe_forward", "execute", kRefuseExecute},
      {"jax_megamoe_backward", "prepare", kRefusePrepare},
      {"jax_megamoe_backward", "initialize", kInitialize},
      {"jax_megamoe_backward", "execute", kRefuseExecute},
  };
}

}  // namespace megamoe
