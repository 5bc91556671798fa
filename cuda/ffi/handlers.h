// The XLA FFI handlers of this library; jax_megamoe/_ffi.py registers and calls them.
#pragma once

#include <vector>

#include "xla/ffi/api/c_api.h"

namespace megamoe {

struct Registration {
  const char* target;
  const char* stage;  // "prepare", "initialize" or "execute"
  XLA_FFI_Handler* handler;
};

// The stages of the plan and of the layer's forward and backward.
std::vector<Registration> LayerRegistrations();

// The stages of the wait probe, one target for each way of reporting a fault.
std::vector<Registration> WaitProbeRegistrations();

// The stages of the peer probe.
std::vector<Registration> PeerProbeRegistrations();

}  // namespace megamoe
