// The handlers of jax_megamoe_backward.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace megamoe {

XLA_FFI_Error* PrepareBackward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteBackward(XLA_FFI_CallFrame* frame);
// With the experts of other ranks: jax_megamoe_backward_peers.
XLA_FFI_Error* ExecuteGroupBackward(XLA_FFI_CallFrame* frame);

}  // namespace megamoe
