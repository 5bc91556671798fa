// Who a process is and where it runs, in terms that other processes can compare.
#pragma once

#include <cstdint>
#include <string>

#include "host/process.h"

namespace megamoe {

std::string HostName();

// Of the machine, until its next start. Containers on one machine have names of their own.
uint64_t HostIdentity();

ProcessCard OwnProcess();

}  // namespace megamoe
