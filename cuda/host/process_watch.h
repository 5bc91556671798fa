// Watches other processes: who waits for one that has ended is told so, however it ended.
#pragma once

#include <chrono>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "host/process.h"

namespace megamoe {

// One thread for the process, begun by the first Watch. It takes no signals and makes no CUDA call.
//
// Processes of the same pid namespace are watched by pidfd, exactly; others of the same network
// namespace by their lifelines, which a child that they have forked, and which has not executed
// another program, keeps open. A lifeline that is not there yet is looked for again: processes open
// theirs when they begin to watch. A process that has stopped but not ended is not found.
class ProcessWatch {
 public:
  // Called by the thread when the process has ended, and again every kPeriod, with the time since,
  // for as long as it returns true.
  using Ended = std::function<bool(std::chrono::milliseconds since)>;

  static constexpr std::chrono::milliseconds kPeriod{100};
  static constexpr std::chrono::milliseconds kLookPeriod{1000};

  // Never destroyed: the thread outlives main.
  static ProcessWatch& Get();

  // "" or why the process of the card cannot be watched from this one, which has the card `mine`.
  // Thread-safe.
  std::string Watch(const ProcessCard& mine, const ProcessCard& card, Ended ended);

  // Calls `look` at least every kLookPeriod, once there is something to watch. Thread-safe.
  void Repeat(std::function<void()> look);

  // Before what the callbacks use is taken down: none runs any more when this returns. The thread
  // stays, where it waits.
  void Stop();

 private:
  using Clock = std::chrono::steady_clock;

  struct Watched {
    uint64_t identity;
    int fd;  // -1: none yet, or none any more
    Ended ended;
    bool has_ended;
    Clock::time_point end;
  };

  std::string Start();
  void Run();
  void Take(std::vector<Watched>* watched, std::vector<std::function<void()>>* looks);
  void Poll(bool has_looks, std::vector<Watched>* watched) const;
  static void Look(bool is_readable, Watched* watched);

  std::mutex acting_;  // while callbacks run
  bool is_stopped_ = false;

  std::mutex mutex_;  // of all below
  std::vector<Watched> added_;
  std::vector<std::function<void()>> added_looks_;
  int wake_fd_ = -1;
};

}  // namespace megamoe
