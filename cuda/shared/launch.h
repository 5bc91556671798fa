// How kernels of one call follow each other in a stream.
#pragma once

#include <cuda_runtime_api.h>

namespace megamoe {

// For the launch of a kernel that calls ptx::WaitForPreviousKernel: it may begin when every block
// of the kernel ahead has begun and let it, which hides its launch.
inline cudaLaunchAttribute EarlyStart() {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace megamoe
