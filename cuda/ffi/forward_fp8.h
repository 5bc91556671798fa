// The handlers of the forward with precision="fp8_block", which ffi/handlers.cc registers.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace megamoe {

XLA_FFI_Error* PrepareFp8Forward(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* ExecuteFp8Forward(XLA_FFI_CallFrame* frame);
// With the experts of other ranks.
XLA_FFI_Error* ExecuteGroupFp8Forward(XLA_FFI_CallFrame* frame);

}  // namespace megamoe
