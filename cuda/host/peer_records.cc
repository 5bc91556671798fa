#include "host/peer_records.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

namespace megamoe {
namespace {

std::string Rank(size_t rank) { return "rank " + std::to_string(rank); }

std::string Device(const std::vector<PeerCard>& cards, size_t rank) {
  return Rank(rank) + " (GPU " + cards[rank].pci_bus + " of " + cards[rank].host_name + ")";
}

std::string Hex(uint64_t value) {
  char text[20];
  std::snprintf(text, sizeof(text), "0x%016llx", static_cast<unsigned long long>(value));
  return text;
}

// What is wrong between rank 0 and another one.
std::string Difference(const PeerCard& first, const PeerCard& card, const std::string& other) {
  if (card.host != first.host) {
    return std::string("rank 0 runs on host ") + first.host_name + " and " + other + " on " +
           card.host_name + "; the ranks of an expert axis are GPUs of one host";
  }
  if (card.configuration != first.configuration) {
    return "rank 0 has configuration " + Hex(first.configuration) + " and " + other + " " +
           Hex(card.configuration) + "; all ranks make the same calls in the same order";
  }
  if (card.bytes != first.bytes) {
    return "rank 0 asks for a workspace of " + std::to_string(first.bytes) + " bytes and " + other +
           " for " + std::to_string(card.bytes) + "; the sizes of a call are those of all ranks";
  }
  return "";
}

}  // namespace

void CopyText(const std::string& text, char* to, size_t size) {
  const size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  std::memset(to + length, 0, size - length);
}

std::string Disagreement(const std::vector<PeerCard>& cards) {
  for (size_t rank = 0; rank < cards.size(); ++rank) {
    if (cards[rank].refusal[0] != '\0') return Rank(rank) + ": " + cards[rank].refusal;
  }
  for (size_t rank = 1; rank < cards.size(); ++rank) {
    const std::string difference = Difference(cards[0], cards[rank], Rank(rank));
    if (!difference.empty()) return difference;
  }
  return "";
}

std::string FullName(const std::vector<PeerCard>& cards, size_t rank) {
  const PeerCard& card = cards[rank];
  return Rank(rank) + " (pid " + std::to_string(card.process.pid) + " on " + card.host_name +
         ", GPU " + card.pci_bus + ")";
}

bool MustGrow(const std::vector<PeerCard>& cards) {
  return std::any_of(cards.begin(), cards.end(),
                     [](const PeerCard& card) { return card.bytes > card.capacity; });
}

std::string FirstFault(const std::vector<PeerCard>& cards, const std::vector<PeerReport>& reports) {
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    const PeerReport& report = reports[rank];
    switch (report.fault) {
      case PeerFault::kNone:
        break;
      case PeerFault::kNoAccess:
        return Device(cards, rank) + " has no peer access to the memory of " +
               Device(cards, report.peer) + ", which the kernels of an expert axis need";
      case PeerFault::kNoMemory:
        return Device(cards, rank) + " needs a workspace of " +
               std::to_string(report.bytes_needed) +
               " bytes for its peers, outside JAX's share of the memory, and has " +
               std::to_string(report.bytes_free) +
               " bytes free; a smaller XLA_PYTHON_CLIENT_MEM_FRACTION leaves more";
      case PeerFault::kCuda:
        return Device(cards, rank) + ": " + report.text;
    }
  }
  return "";
}

}  // namespace megamoe
