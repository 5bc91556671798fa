// The Python module jax_megamoe._cuda. Importing it touches no device.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/hold.h"
#include "ffi/handlers.h"
#include "host/fault.h"
#include "host/process_watch.h"
#include "kernel/backward.h"
#include "kernel/backward_fp8.h"
#include "kernel/forward.h"
#include "kernel/forward_fp8.h"
#include "pipeline/delay_sites.h"
#include "pipeline/seeded_faults.h"

namespace nb = nanobind;

namespace {

nb::dict Registrations() {
  nb::dict targets;
  for (const auto& group : {megamoe::LayerRegistrations(), megamoe::WaitProbeRegistrations(),
                            megamoe::PeerProbeRegistrations()}) {
    for (const megamoe::Registration& r : group) {
      if (!targets.contains(r.target)) targets[r.target] = nb::dict();
      nb::cast<nb::dict>(targets[r.target])[r.stage] =
          nb::capsule(reinterpret_cast<void*>(r.handler));
    }
  }
  return targets;
}

void RaiseIfFailed(const megamoe::CudaStatus& status) {
  if (!status.ok()) throw std::runtime_error("jax_megamoe: " + status.text());
}

// What is left to be said, and the end of what runs beside the program: device and pinned memory go
// next.
void AtExit() {
  megamoe::ReportAllFaults();
  megamoe::ProcessWatch::Get().Stop();
}

void Hold(int count, double deadline_s) {
  RaiseIfFailed(megamoe::HoldMultiprocessors(count, static_cast<uint64_t>(deadline_s * 1e9)));
}

int Release() {
  int count = 0;
  RaiseIfFailed(megamoe::ReleaseMultiprocessors(&count));
  return count;
}

#ifdef MEGAMOE_DELAYS
void SetDelaySeed(uint32_t seed) {
  RaiseIfFailed(megamoe::SetForwardDelays(seed));
  RaiseIfFailed(megamoe::SetFp8ForwardDelays(seed));
  RaiseIfFailed(megamoe::SetBackwardDelays(seed));
  RaiseIfFailed(megamoe::SetFp8BackwardDelays(seed));
}

std::vector<uint32_t> CountDelays() {
  std::vector<uint32_t> delays(megamoe::kNumDelaySites);
  RaiseIfFailed(megamoe::AddForwardDelays(delays.data()));
  RaiseIfFailed(megamoe::AddFp8ForwardDelays(delays.data()));
  RaiseIfFailed(megamoe::AddBackwardDelays(delays.data()));
  RaiseIfFailed(megamoe::AddFp8BackwardDelays(delays.data()));
  return delays;
}
#endif

#ifdef MEGAMOE_FAULTS
void SetFault(uint32_t fault) {
  RaiseIfFailed(megamoe::SetForwardFault(fault));
  RaiseIfFailed(megamoe::SetFp8ForwardFault(fault));
  RaiseIfFailed(megamoe::SetBackwardFault(fault));
  RaiseIfFailed(megamoe::SetFp8BackwardFault(fault));
}

std::vector<std::string> FaultNames() {
  return {std::begin(megamoe::kSeededFaultNames), std::end(megamoe::kSeededFaultNames)};
}
#endif

}  // namespace

NB_MODULE(MEGAMOE_MODULE, m) {
  m.def("registrations", Registrations,
        "{target: {stage: capsule}}, as jax.ffi.register_ffi_target takes them.");
  m.def("abort_waits", &megamoe::AbortWaits, nb::arg("device"),
        "Makes every wait of the calls enqueued so far on a device give up.");
  m.def(
      "take_faults", &megamoe::TakeAllFaults,
      "The texts of all faults of calls that have not been raised yet. No later call raises them.");
  m.def("at_exit", AtExit,
        "Says on standard error what has not been raised; before JAX shuts down.");
  m.def("hold_multiprocessors", Hold, nb::arg("count"), nb::arg("deadline_s"),
        nb::call_guard<nb::gil_scoped_release>(),
        "For tests: keeps that many multiprocessors of the current device from the kernels, until "
        "they are released or the deadline has passed. Returns when it has them.");
  m.def("release_multiprocessors", Release, nb::call_guard<nb::gil_scoped_release>(),
        "Ends the hold; returns how many multiprocessors were held until now.");
#ifdef MEGAMOE_DELAYS
  m.def("set_delay_seed", SetDelaySeed, nb::arg("seed"),
        "The delays of later calls on the current device, see cuda/pipeline/delay.cuh; 0: none.");
  m.def("count_delays", CountDelays,
        "Long delays of the load, store, dispatch, multiply and combine roles, since the seed.");
#endif
#ifdef MEGAMOE_FAULTS
  m.def("set_fault", SetFault, nb::arg("number"),
        "The seeded fault that later calls on the current device have; 0: none.");
  m.def("fault_names", FaultNames, "Of the faults 1, 2, and so on.");
#endif
}
