// The kernels of both passes in FP8, which compile beside the others.
#include "kernel/backward_fp8_steps.cuh"
#include "kernel/forward_fp8_steps.cuh"
#include "kernels.h"

namespace emulator {

void RunFp8Forward(const megamoe::Fp8ForwardMaps& maps, const megamoe::Fp8ForwardParams& params) {
  using namespace megamoe;
  params.gate_up != nullptr ? Skeleton<Fp8ForwardSteps<true>>::Run(maps, params)
                            : Skeleton<Fp8ForwardSteps<false>>::Run(maps, params);
}

namespace {

template <typename Gradients>
void RunFp8BackwardOf(const megamoe::Fp8BackwardMaps& maps,
                      const megamoe::Fp8BackwardParams& params) {
  using namespace megamoe;
  params.gate_up != nullptr ? Skeleton<Fp8BackwardSteps<Gradients, true>>::Run(maps, params)
                            : Skeleton<Fp8BackwardSteps<Gradients, false>>::Run(maps, params);
}

}  // namespace

void RunFp8Backward(const megamoe::Fp8BackwardMaps& maps, const megamoe::Fp8BackwardParams& params,
                    bool float_gradients) {
  float_gradients ? RunFp8BackwardOf<megamoe::F32Gradients>(maps, params)
                  : RunFp8BackwardOf<megamoe::Bf16Gradients>(maps, params);
}

}  // namespace emulator
