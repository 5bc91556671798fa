// The host's end of the fault records.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "shared/cuda_status.h"
#include "shared/fault.h"

namespace megamoe {

// What the calls that fail together share: the abort words, the record, and who is told of it.
// There is one for the calls of one rank on a device, which recover, and one for each rank of a
// group, whose calls all fail once one has.
//
// Thread-safe; but for Open nothing makes a CUDA call, so that a stream's host function may use it.
class FaultChannel {
 public:
  enum class Calls { kAlone, kTied };

  // Allocates it on the current device, `device`. Never destroyed.
  static CudaStatus Open(int device, Calls calls, FaultChannel** channel);

  // How texts name the ranks of a group, whose numbers alone say little.
  void NameRanks(std::vector<std::string> names);

  // The wait context of the next call.
  WaitContext NextCall(int rank, uint64_t deadline_ns);

  // The text of the record that no one has taken yet, or "".
  std::string TakeFault();

  // The one taken last, or "".
  std::string last_fault() const;

  // Says on standard error what no one has taken yet, once. Whether there was a record, ever.
  bool ReportFault();

  // Says on standard error, once for a call, that it waits for long.
  void WarnOfLongWait();

  // Makes every wait of the calls enqueued so far give up.
  void AbortWaits();

  // Makes every wait for this rank give up, which does not come any more; `why` is for the texts.
  void EndRank(int rank, const std::string& why);

 private:
  explicit FaultChannel(Calls calls) : calls_(calls) {}

  CudaStatus Allocate();
  bool HasFault() const;
  std::string Text() const;
  std::string NameOf(int rank) const;

  const Calls calls_;
  FaultPage* page_ = nullptr;
  FaultPage* device_page_ = nullptr;
  uint32_t* failed_epoch_ = nullptr;

  mutable std::mutex mutex_;  // of all below
  std::vector<std::string> names_;
  std::map<int, std::string> ends_;  // by rank, why it does not come
  uint32_t last_epoch_ = 0;
  uint64_t last_deadline_ns_ = 0;
  uint32_t reported_epoch_ = 0;
  uint32_t warned_epoch_ = 0;
  std::string last_fault_;
};

// The channel of the calls of one rank: opened once, when the device is prepared.
CudaStatus OpenFaultChannel(int device);

// NextCall and TakeFault of the channel of the calls of one rank on `device`, which is open; a
// device without one has no fault.
WaitContext NextCall(int device, uint64_t deadline_ns);
std::string TakeFault(int device);

// Of all channels of a device: makes every wait of the calls enqueued so far give up. False if it
// has none.
bool AbortWaits(int device);

// The texts of all records that no one has taken yet.
std::vector<std::string> TakeAllFaults();

// Says on standard error what no one has taken yet, once.
void ReportAllFaults();

}  // namespace megamoe
