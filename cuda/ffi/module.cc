// The Python module jax_megamoe._cuda. Importing it touches no device.
#include <nanobind/nanobind.h>

#include "ffi/handlers.h"
#include "shared/plan.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        const auto [begin, end] = megamoe::AllRegistrations();
        for (const auto* it = begin; it != end; ++it) {
          if (!targets.contains(it->target)) targets[it->target] = nb::dict();
          nb::cast<nb::dict>(targets[it->target])[it->stage] =
              nb::capsule(reinterpret_cast<void*>(it->handler));
        }
        return targets;
      },
      "{target: {stage: capsule}}, as jax.ffi.register_ffi_target takes them.");
  m.def(
      "plan_chunks",
      [](int T, int K, int R) { return R * megamoe::ChunksOf({T, K, R, R}).per_source; },
      nb::arg("T"), nb::arg("K"), nb::arg("R"), "Rows of the scratch result of jax_megamoe_plan.");
}
