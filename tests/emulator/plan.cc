// Runs the kernels of the plan on the emulated machine: plan IN OUT.
//
// IN holds the numbers of `Header` and the expert ids; OUT gets, for each pass, the arrays of its
// plan, in their order, and the words that were to be cleared. tests/emulated.py writes and reads
// them.
#include "shared/plan.h"

#include <cstdio>

#include "machine.h"

// One block runs at a time. It finds what the one before it left there, and must rely on none of
// it.
#undef __shared__
#define __shared__ static
#define __launch_bounds__(...)

// What the sources call of CUDA; the compiler of device code has these templates too.
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, void (*)(Parameters...)) {
  return cudaSuccess;
}
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Arguments&... arguments) {
  if (config->dynamicSmemBytes > emulator::kSharedBytes) return cudaErrorInvalidValue;
  emulator::LaunchOneByOne(config->gridDim.x, config->blockDim.x, [&] { kernel(arguments...); });
  return cudaSuccess;
}

#include "plan/plan.cu"

namespace {

struct Header {
  int32_t T, K, E, R, rank, num_steps, seed, num_cleared;
  int32_t failed_pass;  // in which the call has failed; -1: none
  int32_t num_plans;    // of so many passes, one behind the other
  int32_t pool_routes;
  megamoe::PlanStep steps[megamoe::kMaxSteps];
};

// Memory full of what no plan holds.
std::vector<uint32_t> Garbage(int64_t words) { return std::vector<uint32_t>(words, 0x7b7b7b7b); }

}  // namespace

int main(int argc, char** argv) {
  FILE* in = argc == 3 ? std::fopen(argv[1], "rb") : nullptr;
  Header h;
  if (in == nullptr || std::fread(&h, sizeof(h), 1, in) != 1) emulator::Fail("usage: plan IN OUT");
  std::vector<int32_t> expert_idx(int64_t{h.R} * h.T * h.K);
  if (std::fread(expert_idx.data(), 4, expert_idx.size(), in) != expert_idx.size()) {
    emulator::Fail("IN is too short");
  }
  emulator::Seed(h.seed);
  megamoe::PlanProblem problem = {{h.T, h.K, h.E, h.R}, h.pool_routes, h.rank, h.num_steps, {}};
  std::copy(h.steps, h.steps + h.num_steps, problem.steps);

  std::vector<std::vector<uint32_t>> words;
  for (const auto& field : megamoe::PlanFields(problem)) words.push_back(Garbage(field.elements));
  std::vector<uint32_t> cleared;
  const auto at = [&](int field) { return reinterpret_cast<int32_t*>(words[field].data()); };
  auto* items = reinterpret_cast<megamoe::Item*>(at(5));
  auto* waves = reinterpret_cast<megamoe::Wave*>(at(6));
  const megamoe::PlanArrays arrays = {at(0), at(1), at(2), at(3), at(4),
                                      items, waves, at(7), at(8), words[9].data()};
  FILE* out = std::fopen(argv[2], "wb");
  for (int pass = 0; pass < h.num_plans; ++pass) {
    cleared = Garbage(h.num_cleared);
    uint32_t failed_epoch = h.failed_pass >= 0 && pass >= h.failed_pass;
    const megamoe::WaitContext wait = {nullptr, &failed_epoch, 0, /*epoch=*/1, h.rank};
    const megamoe::CudaStatus status = megamoe::plan::Launch(
        nullptr, problem, pass, expert_idx.data(), arrays, {cleared.data(), h.num_cleared}, wait);
    if (!status.ok()) emulator::Fail(status.call);
    for (size_t i = 0; i + 1 < words.size(); ++i) {  // all but the scratch
      std::fwrite(words[i].data(), 4, words[i].size(), out);
    }
    std::fwrite(cleared.data(), 4, cleared.size(), out);
  }
  std::fclose(out);
}
