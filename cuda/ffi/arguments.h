// What several handlers read from their call, and how they report what is wrong with it.
#pragma once

#include <cstdint>
#include <string>

#include "shared/plan.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

xla::ffi::Error Invalid(const std::string& text);

// The problem of a plan for a routing of dimensions [R, T, K]; pool_routes: PlanProblem has it;
// `steps` holds tiles_m, tiles_n and lag of each step.
xla::ffi::ErrorOr<PlanProblem> ReadPlanProblem(xla::ffi::Span<const int64_t> routing_dims,
                                               int64_t experts, int64_t rank, int64_t pool_routes,
                                               xla::ffi::Span<const int64_t> steps);

// The data of result `i`, which the kernels take for `elements` elements; `name` is for the error.
template <xla::ffi::DataType kType>
xla::ffi::ErrorOr<void*> ReadResult(xla::ffi::RemainingRets& results, int i, const char* name,
                                    int64_t elements) {
  const auto result = results.get<xla::ffi::Buffer<kType>>(i);
  if (result.has_error()) return result.error();
  const int64_t found = (*result)->element_count();
  if (found == elements) return (*result)->untyped_data();
  return Invalid(std::string("result ") + name + " has " + std::to_string(found) +
                 " elements, the kernels write " + std::to_string(elements));
}

// The arrays of a plan among the results of a call, from result `first` on, each of the size that
// the kernel writes.
xla::ffi::ErrorOr<PlanArrays> ReadPlanArrays(const PlanProblem& problem,
                                             xla::ffi::RemainingRets& results, int first);
constexpr int kNumPlanResults = kNumPlanFields;

}  // namespace megamoe
