#include "ffi/group.h"

#include <string>

#include "ffi/common.h"
#include "host/peer_arrays.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

struct GroupAttributes {
  DeviceGroups groups;
  int64_t bytes;  // of a workspace
  uint64_t configuration;
  uint64_t deadline_ns;
};

ffi::ErrorOr<GroupAttributes> Read(const ffi::Dictionary& attributes) {
  const auto groups = ReadDeviceGroups(attributes);
  if (groups.has_error()) return groups.error();
  const char* const names[] = {"T", "K", "E", "H", "configuration", "deadline_ns"};
  int64_t v[6];
  for (int i = 0; i < 6; ++i) {
    const auto number = attributes.get<int64_t>(names[i]);
    if (number.has_error()) return number.error();
    v[i] = *number;
  }
  const RoutingDims dims = {static_cast<int>(v[0]), static_cast<int>(v[1]), static_cast<int>(v[2]),
                            static_cast<int>(groups->num_ranks)};
  return GroupAttributes{*groups, PeerArrayBytes(dims, static_cast<int>(v[3])),
                         static_cast<uint64_t>(v[4]), static_cast<uint64_t>(v[5])};
}

ffi::ErrorOr<PeerWorkspace*> WorkspaceOf(Communicators& communicators, int device,
                                         const GroupAttributes& group) {
  const auto communicator = GetCommunicator(communicators, group.groups);
  if (communicator.has_error()) return communicator.error();
  return &PeerWorkspace::Of(*communicator, device, group.configuration);
}

}  // namespace

ffi::Error PrepareGroup(Communicators communicators, ffi::Dictionary attributes) {
  const auto groups = ReadDeviceGroups(attributes);
  if (groups.has_error()) return groups.error();
  return RequestCommunicator(communicators, *groups);
}

ffi::Error InitializeGroup(Communicators communicators, int32_t device,
                           ffi::Dictionary attributes) {
  const auto group = Read(attributes);
  if (group.has_error()) return group.error();
  const auto workspace = WorkspaceOf(communicators, device, *group);
  if (workspace.has_error()) return workspace.error();
  const std::string why =
      (*workspace)->Prepare({group->bytes, group->deadline_ns, PrepareDevice(device)});
  if (why.empty()) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
}

ffi::ErrorOr<GroupCall> NextGroupCall(Communicators& communicators, int32_t device,
                                      const ffi::Dictionary& attributes) {
  const auto group = Read(attributes);
  if (group.has_error()) return group.error();
  const auto workspace = WorkspaceOf(communicators, device, *group);
  if (workspace.has_error()) return workspace.error();
  GroupCall call = {*workspace, {}};
  if (const std::string why = call.workspace->NextCall(group->bytes, &call.peers); !why.empty()) {
    return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
  }
  if (const std::string fault = TakeFault(device); !fault.empty()) {
    call.workspace->Break(fault);
    return MakeError(ffi::ErrorCode::kAborted, fault);
  }
  return call;
}

}  // namespace megamoe
