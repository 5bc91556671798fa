#include "ffi/arguments.h"

#include "ffi/common.h"

namespace megamoe {

namespace ffi = xla::ffi;

ffi::Error Invalid(const std::string& text) {
  return MakeError(ffi::ErrorCode::kInvalidArgument, text);
}

namespace {

// The limits are refused by name in jax_megamoe/plan.py; here they only keep memory safe.
bool InLimits(const PlanProblem& p, int64_t experts) {
  const RoutingDims& d = p.dims;
  const int64_t routes = int64_t{d.R} * d.T * d.K;
  return d.R > 0 && d.K > 0 && d.K <= kMaxChoices && experts > 0 && experts <= kMaxExperts &&
         d.E % d.R == 0 && p.rank >= 0 && p.rank < d.R && p.pool_routes <= routes &&
         p.pool_routes >= (d.T > 0 ? int64_t{d.R} * d.K : 0);
}

}  // namespace

ffi::ErrorOr<PlanProblem> ReadPlanProblem(ffi::Span<const int64_t> idx_dims, int64_t experts,
                                          int64_t rank, int64_t pool_routes,
                                          ffi::Span<const int64_t> steps) {
  constexpr int kStepFields = 3;
  const int64_t num_steps = steps.size() / kStepFields;
  if (num_steps < 1 || num_steps > kMaxSteps || steps.size() % kStepFields != 0) {
    return Invalid("plan: attribute steps has " + std::to_string(steps.size()) +
                   " numbers; it takes 3 for each of 1 to 4 steps");
  }
  PlanProblem p = {};
  p.dims = {static_cast<int>(idx_dims[1]), static_cast<int>(idx_dims[2]), static_cast<int>(experts),
            static_cast<int>(idx_dims[0])};
  p.pool_routes = pool_routes;
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

ffi::ErrorOr<PlanArrays> ReadPlanArrays(const PlanProblem& problem, ffi::RemainingRets& results,
                                        int first) {
  const auto fields = PlanFields(problem);
  if (results.size() < first + fields.size()) {
    return Invalid("plan: wrong number of results");
  }
  void* pointers[kNumPlanResults];
  for (int i = 0; i < kNumPlanResults; ++i) {
    const ffi::ErrorOr<void*> data =
        ReadResult<ffi::S32>(results, first + i, fields[i].name, fields[i].elements);
    if (data.has_error()) return data.error();
    pointers[i] = *data;
  }
  const auto ints = [&](int i) { return static_cast<int32_t*>(pointers[i]); };
  return PlanArrays{ints(0),
                    ints(1),
                    ints(2),
                    ints(3),
                    ints(4),
                    static_cast<Item*>(pointers[5]),
                    static_cast<Wave*>(pointers[6]),
                    ints(7),
                    ints(8),
                    static_cast<uint32_t*>(pointers[9])};
}

}  // namespace megamoe
