// Keeps multiprocessors busy, for tests: the kernels finish with any number of free pairs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "shared/cuda_status.h"

namespace megamoe {

constexpr int kMaxHeld = 256;

// Starts `count` blocks on a stream of their own on the current device and returns when all of them
// run, each alone with its multiprocessor as far as the library's kernels go. They leave when
// released or after deadline_ns. An even count leaves whole pairs free. One hold at a time; not
// thread-safe.
CudaStatus HoldMultiprocessors(int count, uint64_t deadline_ns);

// Ends the hold and waits for it; *count is how many blocks were there until now.
CudaStatus ReleaseMultiprocessors(int* count);

}  // namespace megamoe
