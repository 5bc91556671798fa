// Bytes beside the arrays of a run that no call may write: behind each allocation, and between the
// arrays of a workspace.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "calls.h"

namespace ranks {

class Canaries {
 public:
  // Behind each allocation.
  static constexpr int64_t kBytes = 256;

  explicit Canaries(Machine& machine) : machine_(machine) {}

  // Memory of so many bytes, with a canary behind it.
  void* Allocate(int64_t bytes) {
    void* data = machine_.Allocate(bytes + kBytes);
    Add(data, bytes, kBytes);
    return data;
  }

  // Behind an array in a workspace, of which the next one begins at a multiple of kBytes.
  void AddGap(void* array, int64_t bytes) {
    Add(array, bytes, (bytes + kBytes - 1) / kBytes * kBytes - bytes);
  }

  // Ends the program unless all are as they were.
  void Check() const {
    for (const Canary& canary : all_) {
      std::vector<uint8_t> found(canary.bytes);
      machine_.CopyOut(found.data(), canary.at, canary.bytes);
      const bool is_whole =
          std::all_of(found.begin(), found.end(), [](uint8_t b) { return b == kByte; });
      if (!is_whole) Fail("a call has written behind one of its arrays");
    }
  }

 private:
  static constexpr uint8_t kByte = 0xc5;

  struct Canary {
    void* at;
    int64_t bytes;
  };

  void Add(void* array, int64_t array_bytes, int64_t bytes) {
    void* at = static_cast<uint8_t*>(array) + array_bytes;
    const std::vector<uint8_t> pattern(bytes, kByte);
    machine_.CopyIn(at, pattern.data(), bytes);
    all_.push_back({at, bytes});
  }

  Machine& machine_;
  std::vector<Canary> all_;
};

}  // namespace ranks
