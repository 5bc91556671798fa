#include "ffi/handlers.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arguments.h"
#include "ffi/backward.h"
#include "ffi/backward_fp8.h"
#include "ffi/common.h"
#include "ffi/forward.h"
#include "ffi/forward_fp8.h"
#include "ffi/group.h"
#include "ffi/layer.h"
#include "plan/plan.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using ExpertIdx = ffi::Buffer<ffi::S32, 3>;  // [R, T, K]

ffi::Error ExecutePlan(cudaStream_t stream, ExpertIdx expert_idx, ffi::RemainingRets results,
                       int64_t experts, int64_t rank, int64_t pool_routes, int64_t num_plans,
                       ffi::Span<const int64_t> steps) {
  const ffi::ErrorOr<PlanProblem> problem =
      ReadPlanProblem(expert_idx.dimensions(), experts, rank, pool_routes, steps);
  if (problem.has_error()) return problem.error();
  const ffi::ErrorOr<PlanArrays> arrays = ReadPlanArrays(*problem, results, 0);
  if (arrays.has_error()) return arrays.error();
  CudaStatus status = {};
  for (int pass = 0; pass < num_plans && status.ok(); ++pass) {
    status = plan::Launch(stream, *problem, pass, expert_idx.typed_data(), *arrays, {}, {});
  }
  return FromCuda(status);
}

XLA_FFI_DEFINE_HANDLER(kExecutePlan, ExecutePlan,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ExpertIdx>()
                           .RemainingRets()
                           .Attr<int64_t>("experts")
                           .Attr<int64_t>("rank")
                           .Attr<int64_t>("pool_routes")
                           .Attr<int64_t>("num_plans")
                           .Attr<ffi::Span<const int64_t>>("steps"));

ffi::Error InitializePeers(Communicators communicators, int32_t device,
                           ffi::Dictionary attributes) {
  const auto group = ReadGroup(attributes);
  if (group.has_error()) return group.error();
  const auto bytes = ReadPeerBytes(attributes);
  if (bytes.has_error()) return bytes.error();
  return InitializeGroup(communicators, device, *group, *bytes);
}

XLA_FFI_DEFINE_HANDLER(kInitializePeers, InitializePeers,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<CollectivesContext>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs());

}  // namespace

std::vector<Registration> LayerRegistrations() {
  return {
      {"jax_megamoe_plan", "initialize", kInitialize},
      {"jax_megamoe_plan", "execute", kExecutePlan},
      {"jax_megamoe_forward", "prepare", PrepareForward},
      {"jax_megamoe_forward", "initialize", kInitialize},
      {"jax_megamoe_forward", "execute", ExecuteForward},
      {"jax_megamoe_forward_fp8", "prepare", PrepareFp8Forward},
      {"jax_megamoe_forward_fp8", "initialize", kInitialize},
      {"jax_megamoe_forward_fp8", "execute", ExecuteFp8Forward},
      {"jax_megamoe_backward", "prepare", PrepareBackward},
      {"jax_megamoe_backward", "initialize", kInitialize},
      {"jax_megamoe_backward", "execute", ExecuteBackward},
      {"jax_megamoe_backward_fp8", "prepare", PrepareFp8Backward},
      {"jax_megamoe_backward_fp8", "initialize", kInitialize},
      {"jax_megamoe_backward_fp8", "execute", ExecuteFp8Backward},
      {"jax_megamoe_forward_peers", "prepare", PrepareGroup},
      {"jax_megamoe_forward_peers", "initialize", kInitializePeers},
      {"jax_megamoe_forward_peers", "execute", ExecuteGroupForward},
      {"jax_megamoe_forward_fp8_peers", "prepare", PrepareGroup},
      {"jax_megamoe_forward_fp8_peers", "initialize", kInitializePeers},
      {"jax_megamoe_forward_fp8_peers", "execute", ExecuteGroupFp8Forward},
      {"jax_megamoe_backward_peers", "prepare", PrepareGroup},
      {"jax_megamoe_backward_peers", "initialize", kInitializePeers},
      {"jax_megamoe_backward_peers", "execute", ExecuteGroupBackward},
      {"jax_megamoe_backward_fp8_peers", "prepare", PrepareGroup},
      {"jax_megamoe_backward_fp8_peers", "initialize", kInitializePeers},
      {"jax_megamoe_backward_fp8_peers", "execute", ExecuteGroupFp8Backward},
  };
}

}  // namespace megamoe
