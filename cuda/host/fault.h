// The host's end of the fault records: one channel per device.
#pragma once

#include <cstdint>
#include <string>

#include "shared/cuda_status.h"
#include "shared/fault.h"

namespace megamoe {

// Allocates the channel of the current device, `device`; once, when the device is prepared.
CudaStatus OpenFaultChannel(int device);

// The wait context of the next call on `device`, whose channel is open.
WaitContext NextCall(int device, int rank, uint64_t deadline_ns);

// The text of the record that no one has taken yet, or "". Thread-safe; makes no CUDA call, so that
// a stream's host function may use it.
std::string TakeFault(int device);

// Makes every wait of the calls enqueued so far give up. False if `device` has no channel.
bool AbortWaits(int device);

}  // namespace megamoe
