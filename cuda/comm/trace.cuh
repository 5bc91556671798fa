// Records a piece of work, when the call asks for a trace.
#pragma once

#include "ptx/sync.cuh"
#include "shared/trace.h"

namespace megamoe {

// Records the time from its construction to the end of its scope. Without a buffer that is one
// uniform branch at each end.
class TraceScope {
 public:
  // `recorder`: true in the one thread that speaks for the piece.
  __device__ __forceinline__ TraceScope(const TraceBuffer& buffer, uint32_t kind, bool recorder)
      : buffer_(buffer), kind_(kind), recorder_(recorder) {
    if (buffer_.records != nullptr) start_ns_ = Now();
  }
  __device__ __forceinline__ ~TraceScope() {
    if (buffer_.records == nullptr || !recorder_) return;
    Record(buffer_, kind_, start_ns_);
  }
  // is_of_peer(): see kTraceOfPeer; asked only where there is a trace.
  template <typename Question>
  __device__ __forceinline__ void MarkIfOfPeer(Question is_of_peer) {
    if (buffer_.records != nullptr && is_of_peer()) kind_ |= kTraceOfPeer;
  }
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  // What a scope does, for who keeps the time of its start elsewhere.
  static __device__ __forceinline__ uint32_t Now() {
    return static_cast<uint32_t>(ptx::GlobalTimerNs());
  }
  static __device__ __forceinline__ void Record(const TraceBuffer& buffer, uint32_t kind,
                                                uint32_t start_ns) {
    const uint32_t i = atomicAdd(&buffer.records[0].start_ns, 1u);
    if (i < buffer.capacity) {
      buffer.records[1 + i] = {start_ns, Now(), ptx::MultiprocessorIndex(), kind};
    }
  }

 private:
  const TraceBuffer& buffer_;
  uint32_t kind_;
  const bool recorder_;
  uint32_t start_ns_ = 0;
};

}  // namespace megamoe
