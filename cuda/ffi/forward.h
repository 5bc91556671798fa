// The handlers of jax_megamoe_forward.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace megamoe {

XLA_FFI_Error* kPrepareForward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* kExecuteForward(XLA_FFI_CallFrame* frame);

}  // namespace megamoe
