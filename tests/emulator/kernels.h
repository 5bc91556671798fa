// The kernels of both passes of one activation, on the emulated machine. Those of SwiGLU are
// compiled with main.cc, the general ones with general.cc.
#pragma once

#include "kernel/activation.cuh"
#include "kernel/backward_steps.cuh"
#include "kernel/forward_steps.cuh"
#include "kernel/skeleton.cuh"
#include "shared/backward_fp8.h"
#include "shared/forward_fp8.h"

namespace emulator {

// As cuda/kernel/forward_kernels.cuh.
template <typename Activation>
void RunForward(const megamoe::ForwardMaps& maps, const megamoe::ForwardParams& params) {
  using namespace megamoe;
  const bool keeps = params.gate_up != nullptr && params.pass == 0;
  if (params.dims.R > 1) {
    keeps ? Skeleton<ForwardSteps<true, true, Activation>>::Run(maps, params)
          : Skeleton<ForwardSteps<false, true, Activation>>::Run(maps, params);
  } else {
    keeps ? Skeleton<ForwardSteps<true, false, Activation>>::Run(maps, params)
          : Skeleton<ForwardSteps<false, false, Activation>>::Run(maps, params);
  }
}

template <typename Activation, typename Gradients, bool kTakesGateUp>
void RunBackwardOf(const megamoe::BackwardMaps& maps, const megamoe::BackwardParams& params) {
  using namespace megamoe;
  params.dims.R > 1
      ? Skeleton<BackwardSteps<Gradients, kTakesGateUp, true, Activation>>::Run(maps, params)
      : Skeleton<BackwardSteps<Gradients, kTakesGateUp, false, Activation>>::Run(maps, params);
}

// As cuda/kernel/backward_kernels.cuh.
template <typename Activation>
void RunBackward(const megamoe::BackwardMaps& maps, const megamoe::BackwardParams& params,
                 bool float_gradients) {
  using namespace megamoe;
  if (params.pass > 0) {
    Skeleton<BackwardSteps<AddedGradients, false, true, Activation>>::Run(maps, params);
  } else if (params.gate_up != nullptr) {
    float_gradients ? RunBackwardOf<Activation, F32Gradients, true>(maps, params)
                    : RunBackwardOf<Activation, Bf16Gradients, true>(maps, params);
  } else {
    float_gradients ? RunBackwardOf<Activation, F32Gradients, false>(maps, params)
                    : RunBackwardOf<Activation, Bf16Gradients, false>(maps, params);
  }
}

extern template void RunForward<megamoe::GeneralUnit>(const megamoe::ForwardMaps&,
                                                      const megamoe::ForwardParams&);
extern template void RunBackward<megamoe::GeneralUnit>(const megamoe::BackwardMaps&,
                                                       const megamoe::BackwardParams&, bool);
// Those in FP8, as cuda/kernel/forward_fp8.cu and backward_fp8.cu, which fp8.cc compiles.
void RunFp8Forward(const megamoe::Fp8ForwardMaps& maps, const megamoe::Fp8ForwardParams& params);
void RunFp8Backward(const megamoe::Fp8BackwardMaps& maps, const megamoe::Fp8BackwardParams& params,
                    bool float_gradients);

// The fault that they have.
void SetGeneralFault(uint32_t fault);

}  // namespace emulator
