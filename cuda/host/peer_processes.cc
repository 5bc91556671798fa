#include "host/peer_processes.h"

#include <cstdio>
#include <map>

#include "host/process_watch.h"

namespace megamoe {

PeerProcesses& PeerProcesses::Of(void* communicator) {
  static std::mutex mutex;
  static auto* all = new std::map<void*, PeerProcesses*>;
  const std::lock_guard<std::mutex> lock(mutex);
  PeerProcesses*& processes = (*all)[communicator];
  if (processes == nullptr) processes = new PeerProcesses;
  return *processes;
}

void PeerProcesses::Watch(const std::vector<PeerCard>& cards, int rank) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!cards_.empty()) return;
  cards_ = cards;
  const ProcessCard& mine = cards[rank].process;
  ProcessWatch::Get().Repeat([this] { LookAtWaits(); });
  std::set<uint64_t> known = {mine.identity};
  for (size_t peer = 0; peer < cards.size(); ++peer) {
    names_.push_back(FullName(cards, peer));
    const ProcessCard& card = cards[peer].process;
    if (!known.insert(card.identity).second) continue;
    const std::string why = ProcessWatch::Get().Watch(
        mine, card, [this, identity = card.identity](std::chrono::milliseconds since) {
          return OnEnded(identity, since);
        });
    if (why.empty()) continue;
    std::fprintf(
        stderr,
        "jax_megamoe: rank %d cannot watch the process of %s: %s; if it ends, waits for it "
        "last to their deadline\n",
        rank, names_.back().c_str(), why.c_str());
  }
}

void PeerProcesses::Add(FaultChannel* channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  channel->NameRanks(names_);
  for (const int rank : ended_ranks_) channel->EndRank(rank, EndOf(rank));
  channels_.push_back(channel);
}

std::string PeerProcesses::Loss() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const int rank : ended_ranks_) {
    text += (text.empty() ? "" : "; ") + EndOf(rank);
  }
  return text;
}

std::string PeerProcesses::EndOf(int rank) const {
  return "the process of " + names_[rank] + " has ended";
}

void PeerProcesses::LookAtWaits() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (FaultChannel* channel : channels_) channel->WarnOfLongWait();
}

bool PeerProcesses::OnEnded(uint64_t identity, std::chrono::milliseconds since) {
  const std::lock_guard<std::mutex> lock(mutex_);
  EndProcess(identity);
  bool are_told = true;
  for (FaultChannel* channel : channels_) {
    if (since > kGrace) channel->AbortWaits();
    are_told &= since > kReport && channel->ReportFault();
  }
  return !are_told && since < kLast;
}

void PeerProcesses::EndProcess(uint64_t identity) {
  for (int rank = 0; rank < static_cast<int>(cards_.size()); ++rank) {
    if (cards_[rank].process.identity != identity) continue;
    ended_ranks_.insert(rank);
    for (FaultChannel* channel : channels_) channel->EndRank(rank, EndOf(rank));
  }
}

}  // namespace megamoe
