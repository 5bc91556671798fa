// The kernels of the forward in FP8, which compile beside the others.
#include "kernel/forward_fp8_steps.cuh"
#include "kernels.h"

namespace emulator {

void RunFp8Forward(const megamoe::Fp8ForwardMaps& maps, const megamoe::Fp8ForwardParams& params) {
  using namespace megamoe;
  params.gate_up != nullptr ? Skeleton<Fp8ForwardSteps<true>>::Run(maps, params)
                            : Skeleton<Fp8ForwardSteps<false>>::Run(maps, params);
}

}  // namespace emulator
