#include "ffi/communicator.h"

#include <string>
#include <vector>

#include "ffi/arguments.h"
#include "shared/peers.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

// Of the communicators that XLA may hold for one group; a call of this library takes the first.
constexpr int64_t kCommunicationId = 0;

std::vector<std::vector<int64_t>> Split(const DeviceGroups& groups) {
  std::vector<std::vector<int64_t>> lists;
  for (const int64_t* id = groups.ids.begin(); id != groups.ids.end(); id += groups.num_ranks) {
    lists.emplace_back(id, id + groups.num_ranks);
  }
  return lists;
}

}  // namespace

ffi::ErrorOr<DeviceGroups> ReadDeviceGroups(const ffi::Dictionary& attributes) {
  const auto num_ranks = attributes.get<int64_t>("R");
  if (num_ranks.has_error()) return num_ranks.error();
  const auto ids = attributes.get<ffi::Span<const int64_t>>("groups");
  if (ids.has_error()) return ids.error();
  if (*num_ranks < 1 || *num_ranks > kMaxRanks || ids->size() == 0 ||
      ids->size() % *num_ranks != 0) {
    return Invalid("attribute groups has " + std::to_string(ids->size()) +
                   " devices for R = " + std::to_string(*num_ranks) +
                   "; it has R of each group, and R is at most " + std::to_string(kMaxRanks));
  }
  return DeviceGroups{*num_ranks, *ids};
}

ffi::Error RequestCommunicator(Communicators& communicators, const DeviceGroups& groups) {
  return communicators.RequestCommunicator(ffi::GroupMode::kFlattenedId, Split(groups),
                                           kCommunicationId);
}

ffi::ErrorOr<void*> GetCommunicator(Communicators& communicators, const DeviceGroups& groups) {
  const auto communicator =
      communicators.GetCommunicator(ffi::GroupMode::kFlattenedId, Split(groups), kCommunicationId);
  if (communicator.has_error()) return communicator.error();
  return static_cast<void*>(*communicator);
}

}  // namespace megamoe
