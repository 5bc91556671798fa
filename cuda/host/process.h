// A process as other processes of its machine know it, and how they learn that it has ended.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <string>

namespace megamoe {

struct ProcessCard {
  uint64_t identity;   // random: ids repeat, in time and between containers
  int64_t pid;         // as the process itself sees it
  uint64_t start;      // clock ticks since the start of the machine
  uint64_t pid_space;  // the namespaces in which pid and start mean this; 0: it cannot open pidfds
  uint64_t network;    // the namespace in which its sockets are found; 0: unknown
};

// The card of a process of the same namespaces, which runs; OwnProcess of host/identity.h has that
// of this one.
ProcessCard CardOf(int64_t pid, uint64_t identity);

// Of a process in the same pid_space: a pidfd, which polls as readable once the process has ended.
// -1 if it has already, also where its pid is another's by now; or if this cannot be told, and
// *why says the reason.
int OpenProcess(const ProcessCard& card, std::string* why);

// The lifeline of this process: a socket with a name made of the identity that others of the same
// network reach, and whose other end hangs up when the process has ended. Nothing is sent. Opened
// once. "" or why not.
std::string OpenLifeline(uint64_t identity);

// The other end of a process's lifeline, or -1: there is none, or none yet, or it is not of this
// user, as anybody's socket may have the name once it is free.
int ReachLifeline(uint64_t identity, uid_t user = geteuid());

}  // namespace megamoe
