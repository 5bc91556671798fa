// A call's part in its expert group: the stages that calls over several ranks have beside their
// own.
#pragma once

#include <cstdint>

#include "ffi/communicator.h"
#include "host/peers.h"
#include "shared/fault.h"
#include "shared/peers.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

// What the attributes of a call say of its group.
struct GroupAttributes {
  DeviceGroups groups;
  uint64_t configuration;
  uint64_t deadline_ns;
};
xla::ffi::ErrorOr<GroupAttributes> ReadGroup(const xla::ffi::Dictionary& attributes);

// The prepare stage, on every device alike.
XLA_FFI_Error* PrepareGroup(XLA_FFI_CallFrame* frame);

// The initialize stage: the workspace that the ranks of the group share, of `bytes` at each.
xla::ffi::Error InitializeGroup(Communicators& communicators, int32_t device,
                                const GroupAttributes& group, int64_t bytes);

// The execute stage.
struct GroupCall {
  PeerWorkspace* workspace;
  Peers peers;
  WaitContext wait;
};
// Counts a call of the group. Fails with the record of an earlier call of the group, which is over
// then.
xla::ffi::ErrorOr<GroupCall> NextGroupCall(Communicators& communicators, int32_t device,
                                           const GroupAttributes& group, int64_t bytes);

// Makes the next call of the group by run(call), which returns an error or none. A rank whose call
// failed has no part in the group any more.
template <typename F>
xla::ffi::Error RunInGroup(Communicators& communicators, int32_t device,
                           const GroupAttributes& group, int64_t bytes, F run) {
  const auto call = NextGroupCall(communicators, device, group, bytes);
  if (call.has_error()) return call.error();
  const xla::ffi::Error error = run(*call);
  if (error.failure()) call->workspace->Break(error.message());
  return error;
}

}  // namespace megamoe
