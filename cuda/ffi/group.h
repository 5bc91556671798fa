// A call's part in its expert group: the stages that calls over several ranks have beside their
// own.
#pragma once

#include <cstdint>

#include "ffi/communicator.h"
#include "host/peers.h"
#include "shared/peers.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

// The prepare stage, on every device alike.
xla::ffi::Error PrepareGroup(Communicators communicators, xla::ffi::Dictionary attributes);

// The initialize stage: the workspace that the ranks of the group share. `attributes` are those of
// a call of the layer.
xla::ffi::Error InitializeGroup(Communicators communicators, int32_t device,
                                xla::ffi::Dictionary attributes);

// The execute stage.
struct GroupCall {
  PeerWorkspace* workspace;
  Peers peers;
};
// Counts a call of the group. Fails with the record of an earlier call of the device, which then
// has no part in the group any more.
xla::ffi::ErrorOr<GroupCall> NextGroupCall(Communicators& communicators, int32_t device,
                                           const xla::ffi::Dictionary& attributes);

}  // namespace megamoe
