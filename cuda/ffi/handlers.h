// The XLA FFI handlers of this library; jax_megamoe/_ffi.py registers and calls them.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace megamoe {

struct Registration {
  const char* target;
  const char* stage;  // "prepare", "initialize" or "execute"
  XLA_FFI_Handler* handler;
};

struct Registrations {
  const Registration* begin;
  const Registration* end;
};

// Every stage of every target.
Registrations AllRegistrations();

}  // namespace megamoe
