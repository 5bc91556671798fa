// The result of a CUDA call together with its text, so that an error can name the call.
#pragma once

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

namespace megamoe {

struct CudaStatus {
  cudaError_t error = cudaSuccess;
  const char* call = "";

  bool ok() const { return error == cudaSuccess; }
  std::string text() const {
    return std::string(call) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error);
  }
};

// The first of the results that is an error, if one is.
inline CudaStatus FirstFailure(std::initializer_list<CudaStatus> results) {
  for (const CudaStatus& result : results) {
    if (!result.ok()) return result;
  }
  return {};
}

}  // namespace megamoe

// Returns from the enclosing function, with the text of `expr`, unless it succeeds.
#define MEGAMOE_RETURN_IF_CUDA_ERROR(expr)                  \
  do {                                                      \
    if (cudaError_t error = (expr); error != cudaSuccess) { \
      return ::megamoe::CudaStatus{error, #expr};           \
    }                                                       \
  } while (false)
