// Readiness of a device, established once per device and process.
#pragma once

#include <string>

namespace megamoe {

// Checks that `device`, which must be the current one, can run the kernels, loads all of them on it
// and opens its fault channel. Returns "" or why not, with the name of the device. Thread-safe;
// only the first success on a device does work.
std::string PrepareDevice(int device);

}  // namespace megamoe
