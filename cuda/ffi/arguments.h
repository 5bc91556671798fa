// What several handlers read from their call, and how they report what is wrong with it.
#pragma once

#include <cstdint>
#include <string>

#include "shared/plan.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

xla::ffi::Error Invalid(const std::string& text);

// The problem of a plan for a routing of dimensions [R, T, K]; `steps` holds tiles_m, tiles_n and
// lag of each step.
xla::ffi::ErrorOr<PlanProblem> ReadPlanProblem(xla::ffi::Span<const int64_t> routing_dims,
                                               int64_t experts, int64_t rank,
                                               xla::ffi::Span<const int64_t> steps);

// The arrays of a plan among the results of a call, from result `first` on, each of the size that
// the kernel writes.
xla::ffi::ErrorOr<PlanArrays> ReadPlanArrays(const PlanProblem& problem,
                                             xla::ffi::RemainingRets& results, int first);
constexpr int kNumPlanResults = 9;

}  // namespace megamoe
