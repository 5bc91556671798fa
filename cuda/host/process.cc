#include "host/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <mutex>
#include <set>
#include <sstream>

namespace megamoe {
namespace {

int PidfdOpen(int64_t pid) {
#ifdef SYS_pidfd_open
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(pid), 0));
#else
  errno = ENOSYS;
  return -1;
#endif
}

// Its number, or 0.
uint64_t NamespaceOf(const char* kind) {
  struct stat found = {};
  return stat((std::string("/proc/self/ns/") + kind).c_str(), &found) == 0 ? found.st_ino : 0;
}

// Field 22 of /proc/PID/stat, or 0. The second one is the name, in parentheses, and may hold any.
uint64_t StartOf(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  for (int i = 3; i < 22; ++i) fields >> field;
  uint64_t start = 0;
  return fields >> start ? start : 0;
}

// /proc may be that of another pid namespace.
bool ProcKnowsPids() {
  char self[32] = {};
  return readlink("/proc/self", self, sizeof(self) - 1) > 0 && self == std::to_string(getpid());
}

uint64_t PidSpace() {
  const int fd = PidfdOpen(getpid());
  if (fd < 0) return 0;
  close(fd);
  const uint64_t pids = NamespaceOf("pid");
  return pids != 0 && ProcKnowsPids() ? pids << 32 ^ NamespaceOf("time") : 0;
}

bool IsReadable(int fd) {
  pollfd poll_fd = {fd, POLLIN, 0};
  return poll(&poll_fd, 1, 0) > 0;
}

// In the abstract namespace: no file is left behind.
socklen_t LifelineAddress(uint64_t identity, sockaddr_un* address) {
  *address = {};
  address->sun_family = AF_UNIX;
  char* const name = address->sun_path + 1;
  const int length = std::snprintf(name, sizeof(address->sun_path) - 1, "jax_megamoe-%016llx",
                                   static_cast<unsigned long long>(identity));
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + length);
}

// Whether who listens at the other end is.
bool IsOfUser(int fd, uid_t user) {
  ucred listener = {};
  socklen_t size = sizeof(listener);
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &listener, &size) == 0 && listener.uid == user;
}

int MakeSocket() { return socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

}  // namespace

ProcessCard CardOf(int64_t pid, uint64_t identity) {
  const uint64_t start = StartOf(pid);
  return {identity, pid, start, start == 0 ? 0 : PidSpace(), NamespaceOf("net")};
}

int OpenProcess(const ProcessCard& card, std::string* why) {
  const int fd = PidfdOpen(card.pid);
  const int error = fd < 0 ? errno : 0;
  // Read behind the pidfd: if the pid is still that of the process, then so is the pidfd.
  const uint64_t start = StartOf(card.pid);
  if (fd >= 0 && start == card.start) return fd;
  const bool is_there = fd < 0 ? error != ESRCH : !IsReadable(fd);
  if (fd >= 0) close(fd);
  if (is_there && (start == 0 || start == card.start)) {
    *why = error != 0 ? std::string("pidfd_open: ") + std::strerror(error)
                      : "/proc does not tell when it has started";
  }
  return -1;
}

std::string OpenLifeline(uint64_t identity) {
  static std::mutex mutex;
  static auto* open = new std::set<uint64_t>;
  const std::lock_guard<std::mutex> lock(mutex);
  if (open->count(identity) > 0) return "";
  // Never accepts: whoever waits to be accepted is hung up on all the same.
  const int fd = MakeSocket();
  sockaddr_un address;
  const socklen_t size = LifelineAddress(identity, &address);
  if (fd < 0 || bind(fd, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(fd, SOMAXCONN) != 0) {
    const std::string why = std::string("a socket for peers: ") + std::strerror(errno);
    if (fd >= 0) close(fd);
    return why;
  }
  open->insert(identity);
  return "";
}

int ReachLifeline(uint64_t identity, uid_t user) {
  const int fd = MakeSocket();
  if (fd < 0) return -1;
  sockaddr_un address;
  const socklen_t size = LifelineAddress(identity, &address);
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 && IsOfUser(fd, user)) {
    return fd;
  }
  close(fd);
  return -1;
}

}  // namespace megamoe
