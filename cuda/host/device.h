// Readiness of the current device, established once per device and process.
#pragma once

#include <string>

namespace megamoe {

// Checks that the current device can run the kernels and loads all of them on it. Returns "" or
// why not, with the name of the device. Thread-safe; only the first success on a device does work.
std::string PrepareDevice();

}  // namespace megamoe
