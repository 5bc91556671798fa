// What the ranks of an expert group tell each other before their kernels do, and what all of them
// conclude from it: every rank judges the same records, so every rank raises the same text.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "host/process.h"

namespace megamoe {

// The first that each rank says.
struct PeerCard {
  uint64_t host;  // of the machine, until its next start
  ProcessCard process;
  int64_t bytes;           // of the workspace that the call asks for
  int64_t capacity;        // of the one that the rank has, 0 for none
  uint64_t configuration;  // hash of what the ranks of a call agree on
  char host_name[64];
  char pci_bus[32];   // of the device: its name on the host, whatever a process sees
  char refusal[512];  // why the rank cannot take part, or ""
};

enum class PeerFault : int32_t { kNone, kNoAccess, kNoMemory, kCuda };

// How a rank came through a step of the setup, and what it offers its peers after it.
struct PeerReport {
  PeerFault fault;
  int32_t peer;          // kNoAccess: to whom
  int64_t bytes_needed;  // kNoMemory
  int64_t bytes_free;
  char text[512];             // kCuda: the call and its error
  uint64_t base;              // of the workspace, valid in its process
  cudaIpcMemHandle_t handle;  // of the workspace, for other processes
};

// Copies as much as fits and ends it with 0.
void CopyText(const std::string& text, char* to, size_t size);

// Why the ranks with these cards cannot work together, naming the ranks and their values, or "".
std::string Disagreement(const std::vector<PeerCard>& cards);

// Whether the workspaces of the ranks, which agree, have to be made anew.
bool MustGrow(const std::vector<PeerCard>& cards);

// How texts name a rank for those who look for its process.
std::string FullName(const std::vector<PeerCard>& cards, size_t rank);

// The text of the first rank that reports a fault, or "".
std::string FirstFault(const std::vector<PeerCard>& cards, const std::vector<PeerReport>& reports);

}  // namespace megamoe
