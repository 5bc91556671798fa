// Watches processes as a rank does those of its peers, cuda/host/process_watch.cc. A line of the
// input says what to do:
//
//   card             prints "card IDENTITY PID START SPACE NETWORK", of this process
//   watch CARD       of another process; CARD is the five numbers. Prints "why TEXT" if it cannot
//   far CARD         the same, as if the other process were in another pid namespace
//   lifeline         opens that of this process, as processes in other pid namespaces do
//   reach ID USER    prints "reached" or "not reached": the lifeline of ID, if it is of that user
//   stop             no callback runs any more
//   fork             a child that does nothing; prints "forked PID"
//
// Prints "ended IDENTITY" when a watched process has ended, and "again IDENTITY" a second time,
// when it is looked at again. Ends with its input, as a program does: main returns.
#include <unistd.h>

#include <cstdio>
#include <iostream>
#include <random>
#include <sstream>
#include <string>

#include "host/process_watch.h"

namespace {

void Print(const std::string& text) {
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

megamoe::ProcessCard OwnCard() {
  static const uint64_t identity = std::random_device()();
  return megamoe::CardOf(getpid(), identity);
}

bool Report(uint64_t identity, std::chrono::milliseconds since) {
  const bool is_first = since < megamoe::ProcessWatch::kPeriod / 2;
  Print((is_first ? "ended " : "again ") + std::to_string(identity));
  return is_first;
}

void Watch(std::istringstream& line, bool is_far) {
  megamoe::ProcessCard card = {};
  line >> card.identity >> card.pid >> card.start >> card.pid_space >> card.network;
  if (is_far) card.pid_space ^= 1;
  const std::string why = megamoe::ProcessWatch::Get().Watch(
      OwnCard(), card,
      [id = card.identity](std::chrono::milliseconds since) { return Report(id, since); });
  if (!why.empty()) Print("why " + why);
}

void Reach(std::istringstream& line) {
  uint64_t identity = 0;
  uid_t user = 0;
  line >> identity >> user;
  const int fd = megamoe::ReachLifeline(identity, user);
  if (fd >= 0) close(fd);
  Print(fd >= 0 ? "reached" : "not reached");
}

void Fork() {
  const pid_t child = fork();
  if (child != 0) return Print("forked " + std::to_string(child));
  for (;;) pause();
}

void Run(const std::string& command, std::istringstream& line) {
  const megamoe::ProcessCard own = OwnCard();
  if (command == "watch" || command == "far") return Watch(line, command == "far");
  if (command == "reach") return Reach(line);
  if (command == "stop") return megamoe::ProcessWatch::Get().Stop();
  if (command == "fork") return Fork();
  if (command == "lifeline") return Print("opened" + megamoe::OpenLifeline(own.identity));
  std::ostringstream card;
  card << "card " << own.identity << ' ' << own.pid << ' ' << own.start << ' ' << own.pid_space
       << ' ' << own.network;
  Print(card.str());
}

}  // namespace

int main() {
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::string command;
    line >> command;
    Run(command, line);
  }
}
