// Who a process is and where it runs, in terms that other processes can compare.
#pragma once

#include <cstdint>
#include <string>

namespace megamoe {

std::string HostName();

// Of the machine, until its next start. Containers on one machine have names of their own.
uint64_t HostIdentity();

// Random, one for the process: process ids repeat between containers.
uint64_t ProcessIdentity();

}  // namespace megamoe
