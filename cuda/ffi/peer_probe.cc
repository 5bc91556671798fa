// The peer probe: each rank of a group gives every other one a row, by the way that kernels take.
#include "comm/peer_probe.h"

#include <cuda_runtime_api.h>

#include <cstdint>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "ffi/group.h"
#include "ffi/handlers.h"

namespace megamoe {
namespace {

namespace ffi = xla::ffi;

using Row = ffi::Buffer<ffi::S32, 1>;   // [N]
using Rows = ffi::Buffer<ffi::S32, 2>;  // [R, N]

struct ProbeAttributes {
  GroupAttributes group;
  int64_t N;

  int64_t bytes() const { return PeerProbeBytes(group.groups.num_ranks, N); }
};

ffi::ErrorOr<ProbeAttributes> Read(const ffi::Dictionary& attributes) {
  const auto group = ReadGroup(attributes);
  if (group.has_error()) return group.error();
  const auto N = attributes.get<int64_t>("N");
  if (N.has_error()) return N.error();
  return ProbeAttributes{*group, *N};
}

ffi::Error InitializeProbe(Communicators communicators, int32_t device,
                           ffi::Dictionary attributes) {
  const auto probe = Read(attributes);
  if (probe.has_error()) return probe.error();
  return InitializeGroup(communicators, device, probe->group, probe->bytes());
}

ffi::Error Execute(Communicators communicators, cudaStream_t stream, int32_t device, Row row,
                   ffi::Result<Rows> received, ffi::Dictionary attributes) {
  const auto probe = Read(attributes);
  if (probe.has_error()) return probe.error();
  if (row.element_count() != static_cast<size_t>(probe->N) ||
      received->element_count() != static_cast<size_t>(probe->group.groups.num_ranks * probe->N)) {
    return Invalid("peer probe: the row and the result are not those of R and N");
  }
  const PeerProbeArrays arrays = {row.typed_data(), received->typed_data(), probe->N};
  return RunInGroup(communicators, device, probe->group, probe->bytes(),
                    [&](const GroupCall& call) {
                      return FromCuda(LaunchPeerProbe(stream, call.wait, call.peers, arrays));
                    });
}

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
      {"jax_megamoe_peer_probe", "prepare", PrepareGroup},
      {"jax_megamoe_peer_probe", "initialize", kInitializeProbe},
      {"jax_megamoe_peer_probe", "execute", kExecute},
  };
}

}  // namespace megamoe
