#include "host/process_watch.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <system_error>
#include <thread>
#include <utility>

namespace megamoe {
namespace {

using std::chrono::duration_cast;
using std::chrono::milliseconds;

// Signals are for the threads that the program knows of.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

template <typename T>
void MoveAll(std::vector<T>* from, std::vector<T>* to) {
  to->insert(to->end(), std::make_move_iterator(from->begin()),
             std::make_move_iterator(from->end()));
  from->clear();
}

}  // namespace

ProcessWatch& ProcessWatch::Get() {
  static auto* watch = new ProcessWatch;
  return *watch;
}

std::string ProcessWatch::Watch(const ProcessCard& mine, const ProcessCard& card, Ended ended) {
  Watched watched = {card.identity, -1, std::move(ended), false, Clock::now()};
  std::string why;
  if (mine.pid_space != 0 && mine.pid_space == card.pid_space) {
    watched.fd = OpenProcess(card, &why);
    watched.has_ended = watched.fd < 0;
  } else if (mine.network != 0 && mine.network == card.network) {
    why = OpenLifeline(mine.identity);
  } else {
    why = "it shares neither a pid nor a network namespace with this one";
  }
  if (!why.empty()) return why;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (why = Start(); !why.empty()) return why;
  added_.push_back(std::move(watched));
  eventfd_write(wake_fd_, 1);
  return "";
}

void ProcessWatch::Repeat(std::function<void()> look) {
  const std::lock_guard<std::mutex> lock(mutex_);
  added_looks_.push_back(std::move(look));
  if (wake_fd_ >= 0) eventfd_write(wake_fd_, 1);
}

void ProcessWatch::Stop() {
  const std::lock_guard<std::mutex> lock(acting_);
  is_stopped_ = true;
}

std::string ProcessWatch::Start() {
  if (wake_fd_ >= 0) return "";
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) return std::string("eventfd: ") + std::strerror(errno);
  wake_fd_ = fd;
  try {
    const SignalsBlocked blocked;
    std::thread([this] { Run(); }).detach();
  } catch (const std::system_error& error) {
    close(std::exchange(wake_fd_, -1));
    return std::string("a thread: ") + error.what();
  }
  return "";
}

void ProcessWatch::Run() {
  std::vector<Watched> watched;
  std::vector<std::function<void()>> looks;
  for (;;) {
    Take(&watched, &looks);
    Poll(!looks.empty(), &watched);
    const std::lock_guard<std::mutex> lock(acting_);
    if (is_stopped_) return;
    for (const auto& look : looks) look();
    const auto now = Clock::now();
    std::erase_if(watched, [now](const Watched& w) {
      return w.has_ended && !w.ended(duration_cast<milliseconds>(now - w.end));
    });
  }
}

void ProcessWatch::Take(std::vector<Watched>* watched, std::vector<std::function<void()>>* looks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  eventfd_t count = 0;
  eventfd_read(wake_fd_, &count);
  MoveAll(&added_, watched);
  MoveAll(&added_looks_, looks);
}

// Until something has happened to a process, or one was added, or there is something to be looked
// at again.
void ProcessWatch::Poll(bool has_looks, std::vector<Watched>* watched) const {
  std::vector<pollfd> fds = {{wake_fd_, POLLIN, 0}};
  for (const Watched& w : *watched) fds.push_back({w.fd, POLLIN, 0});
  const bool looks_again = std::any_of(watched->begin(), watched->end(),
                                       [](const Watched& w) { return w.has_ended || w.fd < 0; });
  const int timeout_ms = static_cast<int>(looks_again ? kPeriod.count()
                                          : has_looks ? kLookPeriod.count()
                                                      : -1);
  if (poll(fds.data(), fds.size(), timeout_ms) < 0) {
    std::this_thread::sleep_for(kPeriod);  // out of memory: the answers are void
    return;
  }
  for (size_t i = 0; i < watched->size(); ++i) Look(fds[i + 1].revents != 0, &(*watched)[i]);
}

void ProcessWatch::Look(bool is_readable, Watched* w) {
  if (w->has_ended) return;
  if (w->fd < 0) {
    w->fd = ReachLifeline(w->identity);
  } else if (is_readable) {
    close(std::exchange(w->fd, -1));
    w->has_ended = true;
    w->end = Clock::now();
  }
}

}  // namespace megamoe
