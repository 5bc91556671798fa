// What the handlers share: the texts of errors and the initialize stage.
#pragma once

#include <cstdint>
#include <string>

#include "host/device.h"
#include "host/fault.h"
#include "shared/cuda_status.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

inline xla::ffi::Error MakeError(xla::ffi::ErrorCode code, const std::string& text) {
  return xla::ffi::Error(code, "jax_megamoe: " + text);
}

inline xla::ffi::Error FromCuda(const CudaStatus& status) {
  if (status.ok()) return xla::ffi::Error::Success();
  return MakeError(xla::ffi::ErrorCode::kInternal, status.text());
}

// The record of an earlier call of one rank on the device, as an error; each record once.
inline xla::ffi::Error EarlierFault(int device) {
  const std::string text = TakeFault(device);
  if (text.empty()) return xla::ffi::Error::Success();
  return MakeError(xla::ffi::ErrorCode::kAborted, text);
}

inline xla::ffi::Error Initialize(int32_t device) {
  const std::string refusal = PrepareDevice(device);
  if (refusal.empty()) return xla::ffi::Error::Success();
  return MakeError(xla::ffi::ErrorCode::kFailedPrecondition, refusal);
}

XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    xla::ffi::Ffi::Bind<xla::ffi::ExecutionStage::kInitialize>().Ctx<xla::ffi::DeviceOrdinal>());

}  // namespace megamoe
