#include "ffi/group.h"

#include <string>

#include "ffi/common.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

ffi::ErrorOr<PeerWorkspace*> WorkspaceOf(Communicators& communicators, int device,
                                         const GroupAttributes& group) {
  const auto communicator = GetCommunicator(communicators, group.groups);
  if (communicator.has_error()) return communicator.error();
  return &PeerWorkspace::Of(*communicator, device, group.configuration);
}

ffi::Error Prepare(Communicators communicators, ffi::Dictionary attributes) {
  const auto groups = ReadDeviceGroups(attributes);
  if (groups.has_error()) return groups.error();
  return RequestCommunicator(communicators, *groups);
}

XLA_FFI_DEFINE_HANDLER(
    PrepareHandler, Prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ctx<CollectivesContext>().Attrs());

}  // namespace

XLA_FFI_Error* PrepareGroup(XLA_FFI_CallFrame* frame) { return PrepareHandler(frame); }

ffi::ErrorOr<GroupAttributes> ReadGroup(const ffi::Dictionary& attributes) {
  const auto groups = ReadDeviceGroups(attributes);
  const auto configuration = attributes.get<int64_t>("configuration");
  const auto deadline_ns = attributes.get<int64_t>("deadline_ns");
  if (groups.has_error()) return groups.error();
  if (configuration.has_error()) return configuration.error();
  if (deadline_ns.has_error()) return deadline_ns.error();
  return GroupAttributes{*groups, static_cast<uint64_t>(*configuration),
                         static_cast<uint64_t>(*deadline_ns)};
}

ffi::Error InitializeGroup(Communicators& communicators, int32_t device,
                           const GroupAttributes& group, int64_t bytes) {
  const auto workspace = WorkspaceOf(communicators, device, group);
  if (workspace.has_error()) return workspace.error();
  const std::string why = (*workspace)->Prepare({bytes, group.deadline_ns, PrepareDevice(device)});
  if (why.empty()) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
}

ffi::ErrorOr<GroupCall> NextGroupCall(Communicators& communicators, int32_t device,
                                      const GroupAttributes& group, int64_t bytes) {
  const auto workspace = WorkspaceOf(communicators, device, group);
  if (workspace.has_error()) return workspace.error();
  GroupCall call = {*workspace, {}, {}};
  if (const std::string fault = call.workspace->TakeFault(); !fault.empty()) {
    return MakeError(ffi::ErrorCode::kAborted, fault);
  }
  const std::string why =
      call.workspace->NextCall(bytes, group.deadline_ns, &call.peers, &call.wait);
  if (why.empty()) return call;
  return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
}

}  // namespace megamoe
