// The roles that a test build delays (pipeline/delay.cuh).
#pragma once

#include <cstdint>

namespace megamoe {

enum class DelaySite : uint32_t { kLoad, kStore, kDispatch, kMultiply, kCombine };
constexpr int kNumDelaySites = 5;

}  // namespace megamoe
