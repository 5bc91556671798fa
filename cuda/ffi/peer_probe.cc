// The peer probe: each rank of a group gives every other one a row, by the way that kernels take.
#include "comm/peer_probe.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "ffi/communicator.h"
#include "ffi/handlers.h"
#include "host/device.h"
#include "host/fault.h"
#include "host/peers.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using Row = ffi::Buffer<ffi::S32, 1>;   // [N]
using Rows = ffi::Buffer<ffi::S32, 2>;  // [R, N]

struct ProbeAttributes {
  DeviceGroups groups;
  int64_t N;
  uint64_t configuration;
  uint64_t deadline_ns;

  int64_t bytes() const { return PeerProbeBytes(groups.num_ranks, N); }
};

ffi::ErrorOr<ProbeAttributes> Read(const ffi::Dictionary& attributes) {
  const auto groups = ReadDeviceGroups(attributes);
  if (groups.has_error()) return groups.error();
  int64_t numbers[3];
  const char* names[] = {"N", "configuration", "deadline_ns"};
  for (int i = 0; i < 3; ++i) {
    const auto number = attributes.get<int64_t>(names[i]);
    if (number.has_error()) return number.error();
    numbers[i] = *number;
  }
  return ProbeAttributes{*groups, numbers[0], static_cast<uint64_t>(numbers[1]),
                         static_cast<uint64_t>(numbers[2])};
}

ffi::ErrorOr<PeerWorkspace*> WorkspaceOf(Communicators& communicators, int device,
                                         const ProbeAttributes& probe) {
  const auto communicator = GetCommunicator(communicators, probe.groups);
  if (communicator.has_error()) return communicator.error();
  return &PeerWorkspace::Of(*communicator, device, probe.configuration);
}

ffi::Error Prepare(Communicators communicators, ffi::Dictionary attributes) {
  const auto probe = Read(attributes);
  if (probe.has_error()) return probe.error();
  return RequestCommunicator(communicators, probe->groups);
}

ffi::Error InitializeProbe(Communicators communicators, int32_t device,
                           ffi::Dictionary attributes) {
  const auto probe = Read(attributes);
  if (probe.has_error()) return probe.error();
  const auto workspace = WorkspaceOf(communicators, device, *probe);
  if (workspace.has_error()) return workspace.error();
  const std::string why =
      (*workspace)->Prepare({probe->bytes(), probe->deadline_ns, PrepareDevice(device)});
  if (why.empty()) return ffi::Error::Success();
  return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
}

ffi::Error Execute(Communicators communicators, cudaStream_t stream, int32_t device, Row row,
                   ffi::Result<Rows> received, ffi::Dictionary attributes) {
  const auto probe = Read(attributes);
  if (probe.has_error()) return probe.error();
  if (row.element_count() != static_cast<size_t>(probe->N) ||
      received->element_count() != static_cast<size_t>(probe->groups.num_ranks * probe->N)) {
    return Invalid("peer probe: the row and the result are not those of R and N");
  }
  const auto workspace = WorkspaceOf(communicators, device, *probe);
  if (workspace.has_error()) return workspace.error();
  Peers peers;
  if (const std::string why = (*workspace)->NextCall(probe->bytes(), &peers); !why.empty()) {
    return MakeError(ffi::ErrorCode::kFailedPrecondition, why);
  }
  if (const std::string fault = TakeFault(device); !fault.empty()) {
    (*workspace)->Break(fault);
    return MakeError(ffi::ErrorCode::kAborted, fault);
  }
  const WaitContext wait = NextCall(device, peers.rank, probe->deadline_ns);
  const CudaStatus status =
      LaunchPeerProbe(stream, wait, peers, {row.typed_data(), received->typed_data(), probe->N});
  if (!status.ok()) (*workspace)->Break(status.text());
  return FromCuda(status);
}

XLA_FFI_DEFINE_HANDLER(
    kPrepare, Prepare,
    ffi::Ffi::Bind<ffi::ExecutionStage::kPrepare>().Ctx<CollectivesContext>().Attrs());
XLA_FFI_DEFINE_HANDLER(kInitializeProbe, InitializeProbe,
                       ffi::Ffi::Bind<ffi::ExecutionStage::kInitialize>()
                           .Ctx<CollectivesContext>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Attrs());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<CollectivesContext>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Ctx<ffi::DeviceOrdinal>()
                           .Arg<Row>()
                           .Ret<Rows>()
                           .Attrs());

}  // namespace

std::vector<Registration> PeerProbeRegistrations() {
  return {
      {"jax_megamoe_peer_probe", "prepare", kPrepare},
      {"jax_megamoe_peer_probe", "initialize", kInitializeProbe},
      {"jax_megamoe_peer_probe", "execute", kExecute},
  };
}

}  // namespace megamoe
