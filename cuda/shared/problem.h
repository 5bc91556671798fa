// The dimensions of one call; the letters are the dimension key of jax_megamoe/config.py.
#pragma once

// Before a function that host and device code call.
#ifdef __CUDACC__
#define MEGAMOE_HOST_DEVICE __host__ __device__
#else
#define MEGAMOE_HOST_DEVICE
#endif

namespace megamoe {

// Pool rows of an expert start at a multiple of this and are padded to the next one.
constexpr int kTileRows = 128;

struct RoutingDims {
  int T;  // tokens per rank
  int K;  // choices per token
  int E;  // experts, over all ranks
  int R;  // expert-parallel ranks

  MEGAMOE_HOST_DEVICE constexpr int experts_per_rank() const { return E / R; }
};

}  // namespace megamoe
