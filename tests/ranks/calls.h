// Calls of both passes for the ranks of an expert group, from a file, on a machine that runs all of
// them in one process: an emulated one (tests/emulator/main.cc) or one GPU
// (tests/ranks/one_gpu.cc).
//
// IN holds the numbers of `Header` and, for each call, those of `CallHeader` and of each rank, if
// Header::has_plans, the arrays of its plan in each pass, and its operands; OUT gets the results in
// that order, then of each rank the epoch of the last call that has failed and its record, and how
// many ns all of it took. tests/emulated.py writes and reads them. All else that a call takes is
// full of 0xff, which is NaN, and behind every array are canaries.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

#include "host/layer.h"
#include "shared/fault.h"

namespace ranks {

struct Header {
  int32_t num_calls, R, T, K, E, H, I, num_blocks, pool_routes;
  int32_t multiprocessors;  // of each rank
  int32_t seed;
  int32_t fault;         // of the kernels; -1: a byte is written behind an array
  int32_t failed_ranks;  // a bit for each: its waits give up soon, in all calls
  int32_t deadline;      // of a wait: turns of the emulated machine, ms of a GPU; 0: none, 10 s
  int32_t peer_bytes;    // as jax_megamoe/_call_arrays.py has them
  int32_t bf16_sums;
  int32_t ended_ranks;  // a bit for each: the host says that waits for it are in vain
  int32_t has_plans;
  int32_t has_codes;  // of PeerLayout
  // Rank 0 makes so many calls as it should, -1: all. Of the next one it shares its inputs and runs
  // so many kernels, -1: none of it; then it stalls.
  int32_t whole_calls, stalled_kernels;
};

// The fields of PlanArrays; of a plan from IN all but the scratch.
using PlanPointers = std::array<void*, megamoe::kNumPlanFields>;
constexpr int kNumPlanArrays = megamoe::kNumPlanFields - 1;

// What the calls are run on.
class Machine {
 public:
  virtual ~Machine() = default;

  // Memory of the ranks, full of 0xff.
  virtual void* Allocate(int64_t bytes) = 0;
  virtual void CopyIn(void* to, const void* from, int64_t bytes) = 0;
  virtual void CopyOut(void* to, const void* from, int64_t bytes) = 0;
  // Before a call of a rank is enqueued. plans: of each pass, from IN. Returns what its waits take.
  virtual megamoe::WaitContext Begin(int rank, uint32_t epoch,
                                     const std::vector<PlanPointers>& plans) = 0;
  // Of the rank whose call has begun.
  virtual cudaStream_t Stream() = 0;
  // Enqueues, of what enqueue() does, the share and so many kernels.
  virtual void EnqueueStart(int num_kernels, const std::function<void()>& enqueue) = 0;
  // Runs all that is enqueued, to its end.
  virtual void Run() = 0;
  // Of the last call of the rank that has failed, 0 for none.
  virtual uint32_t FailedEpoch(int rank) = 0;
  // Of the first one.
  virtual const megamoe::FaultRecord& Record(int rank) = 0;
};

// Reads IN and writes OUT; start(header) makes the machine.
void RunFile(const char* in, const char* out, Machine& (*start)(const Header&));

[[noreturn]] void Fail(const char* why);

}  // namespace ranks
