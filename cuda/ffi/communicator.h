// XLA's communicator of a group of devices: asked for in the prepare stage, there in the later
// ones.
#pragma once

#include <cstdint>

#include "xla/ffi/api/collectives_api.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

// The tag by which a handler binds XLA's collectives: .Ctx<CollectivesContext>(). The headers have
// its parts and leave the whole to their users.
using Communicators = xla::ffi::internal::CommunicatorContextBase<xla::ffi::internal::ErrorPolicy>;
struct Collectives : xla::ffi::internal::CollectivesExtensionBase<Communicators> {};
using CollectivesContext = xla::ffi::Extension<Collectives>;

// The attributes R and groups of a call: the flattened ids of its devices, R at a time, those of
// one group in the order of their ranks. A flattened id counts the devices of the program.
struct DeviceGroups {
  int64_t num_ranks;
  xla::ffi::Span<const int64_t> ids;
};

xla::ffi::ErrorOr<DeviceGroups> ReadDeviceGroups(const xla::ffi::Dictionary& attributes);

// The prepare stage, on every device alike.
xla::ffi::Error RequestCommunicator(Communicators& communicators, const DeviceGroups& groups);

// The initialize and execute stages: the ncclComm_t of this device in its group, which is XLA's.
xla::ffi::ErrorOr<void*> GetCommunicator(Communicators& communicators, const DeviceGroups& groups);

}  // namespace megamoe
