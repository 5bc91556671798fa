// The wait probe: one kernel that waits, and the ways in which its fault can become an exception.
//
//   future     execute returns a future that a host function of the stream completes.
//   next_call  execute returns at once; the next call on the device returns the error.
//   trap       as next_call, and the kernel traps: the stream's own error ends the failing step.
#include "comm/wait_probe.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "ffi/common.h"
#include "ffi/handlers.h"
#include "host/fault.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using Word = ffi::Buffer<ffi::S32, 1>;

CudaStatus Launch(cudaStream_t stream, int device, ffi::Result<Word> result, ffi::Result<Word> flag,
                  int64_t deadline_ns, int64_t release_ns, bool trap_on_fault) {
  const WaitContext context = NextCall(device, static_cast<uint64_t>(deadline_ns));
  const ProbeArrays arrays = {static_cast<uint32_t*>(flag->untyped_data()), result->typed_data()};
  return LaunchWaitProbe(stream, context, release_ns, trap_on_fault, arrays);
}

template <bool kTrapOnFault>
ffi::Error ExecuteNextCall(cudaStream_t stream, int32_t device, Word, ffi::Result<Word> result,
                           ffi::Result<Word> flag, int64_t deadline_ns, int64_t release_ns) {
  if (ffi::Error earlier = EarlierFault(device); earlier.failure()) return earlier;
  return FromCuda(Launch(stream, device, result, flag, deadline_ns, release_ns, kTrapOnFault));
}

struct PendingCall {
  ffi::Promise promise;
  int device;
};

void CompleteCall(void* data) {
  const std::unique_ptr<PendingCall> call(static_cast<PendingCall*>(data));
  ffi::Error error = EarlierFault(call->device);
  if (error.failure()) {
    call->promise.SetError(std::move(error));
  } else {
    call->promise.SetAvailable();
  }
}

CudaStatus CompleteAfter(cudaStream_t stream, std::unique_ptr<PendingCall>& call) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchHostFunc(stream, CompleteCall, call.get()));
  call.release();
  return {};
}

ffi::Future ExecuteFuture(cudaStream_t stream, int32_t device, Word, ffi::Result<Word> result,
                          ffi::Result<Word> flag, int64_t deadline_ns, int64_t release_ns) {
  auto call = std::make_unique<PendingCall>();
  call->device = device;
  ffi::Future future(call->promise);
  CudaStatus status = Launch(stream, device, result, flag, deadline_ns, release_ns, false);
  if (status.ok()) status = CompleteAfter(stream, call);
  if (!status.ok()) call->promise.SetError(FromCuda(status));
  return future;
}

auto Binding() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Ctx<ffi::DeviceOrdinal>()
      .Arg<Word>()
      .Ret<Word>()
      .Ret<Word>()
      .Attr<int64_t>("deadline_ns")
      .Attr<int64_t>("release_ns");
}

XLA_FFI_DEFINE_HANDLER(kExecuteFuture, ExecuteFuture, Binding());
XLA_FFI_DEFINE_HANDLER(kExecuteNextCall, ExecuteNextCall<false>, Binding());
XLA_FFI_DEFINE_HANDLER(kExecuteTrap, ExecuteNextCall<true>, Binding());

}  // namespace

std::vector<Registration> WaitProbeRegistrations() {
  return {
      {"jax_megamoe_wait_probe_future", "initialize", kInitialize},
      {"jax_megamoe_wait_probe_future", "execute", kExecuteFuture},
      {"jax_megamoe_wait_probe_next_call", "initialize", kInitialize},
      {"jax_megamoe_wait_probe_next_call", "execute", kExecuteNextCall},
      {"jax_megamoe_wait_probe_trap", "initialize", kInitialize},
      {"jax_megamoe_wait_probe_trap", "execute", kExecuteTrap},
  };
}

}  // namespace megamoe
