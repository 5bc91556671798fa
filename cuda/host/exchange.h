// Small records that the ranks of a communicator tell each other.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "host/nccl.h"
#include "shared/cuda_status.h"

namespace megamoe {

// One end of a communicator, used by one thread at a time. Never closed: its stream and its few
// kilobytes of device memory stay for the process, as XLA's communicators do.
class Exchange {
 public:
  static constexpr size_t kMaxRecordBytes = 1024;

  // Once, on the device of the communicator. "" or why not.
  std::string Open(void* communicator);

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // How long a rank waits for the others.
  struct Patience {
    uint64_t deadline_ns;
    std::function<std::string()> loss;  // why it waits in vain, or ""
  };

  // Fills `all` with the records of all ranks in their order. Returns "", or why it could not: the
  // other ranks did not come within the deadline or were lost, or an error of CUDA or NCCL.
  //
  // Blocks the host, but for longer than the deadline nothing: a peer may still be compiling, and
  // may be running another program. Says on standard error, once, that it waits for long.
  template <typename Record>
  std::string Gather(const Record& mine, const Patience& patience, std::vector<Record>* all) {
    static_assert(std::is_trivially_copyable_v<Record> && sizeof(Record) <= kMaxRecordBytes);
    all->resize(num_ranks_);
    return GatherBytes(&mine, sizeof(Record), patience, all->data());
  }

 private:
  CudaStatus OpenDeviceSide();
  std::string GatherBytes(const void* mine, size_t bytes, const Patience& patience, void* all);
  std::string Await(int nccl_result, const Patience& patience);
  std::string NcclText(const char* call, int error) const;

  const Nccl* nccl_ = nullptr;
  void* communicator_ = nullptr;
  int rank_ = 0;
  int num_ranks_ = 0;
  cudaStream_t stream_ = nullptr;
  char* memory_ = nullptr;  // on the device: own record, then those of all ranks
};

}  // namespace megamoe
