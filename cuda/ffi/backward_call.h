// What the handlers of the backward share, whatever the precision.
#pragma once

#include <cstdint>

#include "host/backward.h"
#include "shared/part.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

constexpr int64_t kBackwardParts =
    kDispatch | kDgradDown | kDgradGateUp | kCombine | kWgradDown | kWgradGateUp | kFinish;

// The gradients, the plan, the pools and counters and, behind `num_others` results that are the
// caller's, perhaps a trace. Returns where those others begin. Call with biases.
xla::ffi::ErrorOr<int> ReadBackwardResults(const char* pass, xla::ffi::RemainingRets& results,
                                           int num_others, BackwardCall* call);

// What the forward kept is one more operand, the last, behind the biases.
xla::ffi::Error ReadGateUp(const char* pass, xla::ffi::RemainingArgs& operands,
                           const xla::ffi::Dictionary& attributes, BackwardCall* call);

}  // namespace megamoe
