// The Python module jax_megamoe._cuda. Importing it touches no device.
#include <nanobind/nanobind.h>

#include "ffi/handlers.h"
#include "host/fault.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        for (const auto& group :
             {megamoe::LayerRegistrations(), megamoe::WaitProbeRegistrations()}) {
          for (const megamoe::Registration& r : group) {
            if (!targets.contains(r.target)) targets[r.target] = nb::dict();
            nb::cast<nb::dict>(targets[r.target])[r.stage] =
                nb::capsule(reinterpret_cast<void*>(r.handler));
          }
        }
        return targets;
      },
      "{target: {stage: capsule}}, as jax.ffi.register_ffi_target takes them.");
  m.def("abort_waits", &megamoe::AbortWaits, nb::arg("device"),
        "Makes every wait of the calls enqueued so far on a device give up.");
}
