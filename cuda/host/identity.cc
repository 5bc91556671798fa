#include "host/identity.h"

#include <unistd.h>

#include <fstream>
#include <random>

namespace megamoe {

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "(no name)";
}

uint64_t HostIdentity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot_id;
  if (!(file >> boot_id)) boot_id = HostName();
  uint64_t hash = 0xcbf29ce484222325u;  // FNV-1a, the same in all builds
  for (const unsigned char c : boot_id) hash = (hash ^ c) * 0x100000001b3u;
  return hash;
}

ProcessCard OwnProcess() {
  static const ProcessCard card = [] {
    std::random_device random;
    return CardOf(getpid(), uint64_t{random()} << 32 | random());
  }();
  return card;
}

}  // namespace megamoe
