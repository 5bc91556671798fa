// The kernels of both passes in FP8, which compile beside the others.
#include "kernel/backward_fp8_steps.cuh"
#include "kernel/forward_fp8_steps.cuh"
#include "kernels.h"

namespace emulator {
namespace {

using namespace megamoe;

template <bool kWithPeers>
void RunForwardOf(const Fp8ForwardMaps& maps, const Fp8ForwardParams& params) {
  params.gate_up != nullptr&& params.pass == 0
      ? Skeleton<Fp8ForwardSteps<true, kWithPeers>>::Run(maps, params)
      : Skeleton<Fp8ForwardSteps<false, kWithPeers>>::Run(maps, params);
}

template <typename Gradients, bool kWithPeers>
void RunBackwardOf(const Fp8BackwardMaps& maps, const Fp8BackwardParams& params) {
  params.gate_up != nullptr
      ? Skeleton<Fp8BackwardSteps<Gradients, true, kWithPeers>>::Run(maps, params)
      : Skeleton<Fp8BackwardSteps<Gradients, false, kWithPeers>>::Run(maps, params);
}

template <bool kWithPeers>
void RunBackwardOf(const Fp8BackwardMaps& maps, const Fp8BackwardParams& params,
                   bool float_gradients) {
  float_gradients ? RunBackwardOf<F32Gradients, kWithPeers>(maps, params)
                  : RunBackwardOf<Bf16Gradients, kWithPeers>(maps, params);
}

}  // namespace

void RunFp8Forward(const Fp8ForwardMaps& maps, const Fp8ForwardParams& params) {
  params.dims.R > 1 ? RunForwardOf<true>(maps, params) : RunForwardOf<false>(maps, params);
}

void RunFp8Backward(const Fp8BackwardMaps& maps, const Fp8BackwardParams& params,
                    bool float_gradients) {
  if (params.pass > 0) {
    Skeleton<Fp8BackwardSteps<AddedGradients, false, true>>::Run(maps, params);
  } else if (params.dims.R > 1) {
    RunBackwardOf<true>(maps, params, float_gradients);
  } else {
    RunBackwardOf<false>(maps, params, float_gradients);
  }
}

}  // namespace emulator
