#include "comm/peer_probe.h"
#include "comm/wait.cuh"

namespace megamoe {
namespace {

constexpr int kThreads = 256;
// Of each workspace: a flag for each source, then two halves for the rows of all sources. The epoch
// of a call says which half it takes: a rank that is one call ahead writes into the other one, and
// none is two ahead, since it waits for the flags of all ranks, which they raise after they have
// read what the call before brought.
constexpr int64_t kFlagBytes = 256;
constexpr int64_t kAlignment = 16;

__device__ uint32_t* FlagOf(std::byte* workspace, int source) {
  return reinterpret_cast<uint32_t*>(workspace) + source;
}

__device__ int32_t* RowsIn(std::byte* workspace, const Peers& peers) {
  const int64_t half_bytes = (peers.bytes - kFlagBytes) / 2 / kAlignment * kAlignment;
  return reinterpret_cast<int32_t*>(workspace + kFlagBytes + peers.epoch % 2 * half_bytes);
}

// One block, so that no rank waits for a block that may not be resident.
__global__ __launch_bounds__(kThreads, 1) void PeerProbe(const __grid_constant__ WaitContext wait,
                                                         const __grid_constant__ Peers peers,
                                                         PeerProbeArrays arrays) {
  for (int peer = 0; peer < peers.num_ranks; ++peer) {
    int32_t* row = RowsIn(peers.base[peer], peers) + peers.rank * arrays.N;
    for (int64_t i = threadIdx.x; i < arrays.N; i += kThreads) row[i] = arrays.row[i];
  }
  __syncthreads();  // before the release below, which so holds for the stores of all threads
  std::byte* own = peers.base[peers.rank];
  if (threadIdx.x < kWarpThreads) {
    const int peer = static_cast<int>(threadIdx.x);
    const bool is_rank = peer < peers.num_ranks;
    if (is_rank) ptx::StoreReleaseSystem(FlagOf(peers.base[peer], peers.rank), peers.epoch);
    const WaitSite site = {Phase::kProbe, peer, /*expert=*/-1, /*block=*/0};
    const auto poll = [&] { return ptx::LoadAcquireSystem(FlagOf(own, peer)); };
    BoundedWait(is_rank, poll, peers.epoch, /*pause_ns=*/0, wait, site);
  }
  __syncthreads();
  const int32_t* rows = RowsIn(own, peers);
  for (int64_t i = threadIdx.x; i < peers.num_ranks * arrays.N; i += kThreads) {
    arrays.received[i] = rows[i];
  }
}

}  // namespace

int64_t PeerProbeBytes(int64_t num_ranks, int64_t N) {
  const int64_t row_bytes = num_ranks * N * static_cast<int64_t>(sizeof(int32_t));
  return kFlagBytes + 2 * ((row_bytes + kAlignment - 1) / kAlignment * kAlignment);
}

CudaStatus LoadPeerProbe() {
  cudaFuncAttributes attributes;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaFuncGetAttributes(&attributes, PeerProbe));
  return {};
}

CudaStatus LaunchPeerProbe(cudaStream_t stream, const WaitContext& wait, const Peers& peers,
                           const PeerProbeArrays& arrays) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaLaunchKernelEx(&config, PeerProbe, wait, peers, arrays));
  return {};
}

}  // namespace megamoe
