// The handlers of jax_megamoe_forward.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace megamoe {

XLA_FFI_Error* PrepareForward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteForward(XLA_FFI_CallFrame* frame);
// With the experts of other ranks: jax_megamoe_forward_peers.
XLA_FFI_Error* ExecuteGroupForward(XLA_FFI_CallFrame* frame);

}  // namespace megamoe
