// The few functions of NCCL that the library calls, of the copy that XLA has loaded: its
// communicators are not those of another. Nothing is linked and no header is needed.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

namespace megamoe {

// Results are ncclResult_t; a communicator is an ncclComm_t.
struct Nccl {
  static constexpr int kSuccess = 0;
  static constexpr int kInProgress = 7;
  static constexpr int kInt8 = 0;  // of ncclDataType_t

  int (*all_gather)(const void* from, void* to, size_t count, int type, void* communicator,
                    cudaStream_t stream);
  int (*count)(void* communicator, int* num_ranks);
  int (*user_rank)(void* communicator, int* rank);
  int (*async_error)(void* communicator, int* error);
  const char* (*error_string)(int error);
};

// Returns "" and the functions, or why there are none. Thread-safe; looks until it has found them.
std::string FindNccl(const Nccl** nccl);

}  // namespace megamoe
