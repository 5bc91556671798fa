// The kernels of any activation and of biases, which compile beside the others.
#include "kernels.h"

namespace emulator {

template void RunForward<megamoe::GeneralUnit>(const megamoe::ForwardMaps&,
                                               const megamoe::ForwardParams&);
template void RunBackward<megamoe::GeneralUnit>(const megamoe::BackwardMaps&,
                                                const megamoe::BackwardParams&, bool);

void SetGeneralFault(uint32_t fault) { megamoe::seeded_fault = fault; }

}  // namespace emulator
