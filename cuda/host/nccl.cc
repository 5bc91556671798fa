#include "host/nccl.h"

#include <dlfcn.h>

#include <mutex>

namespace megamoe {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

// The name of a function that the library lacks, or "".
std::string FindAll(void* library, Nccl* nccl) {
  if (!Find(library, "ncclAllGather", &nccl->all_gather)) return "ncclAllGather";
  if (!Find(library, "ncclCommCount", &nccl->count)) return "ncclCommCount";
  if (!Find(library, "ncclCommUserRank", &nccl->user_rank)) return "ncclCommUserRank";
  if (!Find(library, "ncclCommGetAsyncError", &nccl->async_error)) return "ncclCommGetAsyncError";
  if (!Find(library, "ncclGetErrorString", &nccl->error_string)) return "ncclGetErrorString";
  return "";
}

}  // namespace

std::string FindNccl(const Nccl** nccl) {
  static std::mutex mutex;
  static Nccl found;
  static bool is_found = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (!is_found) {
    void* library = dlopen(kLibrary, RTLD_NOLOAD | RTLD_LAZY);
    if (library == nullptr) {
      return std::string("JAX has not loaded ") + kLibrary +
             ", by which the GPUs of an expert axis find each other";
    }
    if (const std::string missing = FindAll(library, &found); !missing.empty()) {
      return std::string(kLibrary) + " has no " + missing;
    }
    is_found = true;
  }
  *nccl = &found;
  return "";
}

}  // namespace megamoe
