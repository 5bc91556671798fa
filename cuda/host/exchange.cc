#include "host/exchange.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "shared/peers.h"

namespace megamoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kPause = std::chrono::microseconds(50);

// After which a wait is worth a word: a minute, or a part of a deadline that is not much longer.
std::chrono::nanoseconds LongWait(std::chrono::nanoseconds deadline) {
  return std::min<std::chrono::nanoseconds>(std::chrono::minutes(1), deadline / 4);
}

std::string Ms(std::chrono::nanoseconds time) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(time).count()) +
         " ms";
}

CudaStatus CopyIn(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
  return {};
}

CudaStatus CopyOut(void* to, const void* from, size_t bytes, cudaStream_t stream) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream));
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  return {};
}

}  // namespace

std::string Exchange::Open(void* communicator) {
  if (memory_ != nullptr) return "";
  if (std::string why = FindNccl(&nccl_); !why.empty()) return why;
  communicator_ = communicator;
  if (const int error = nccl_->count(communicator, &num_ranks_); error != Nccl::kSuccess) {
    return NcclText("ncclCommCount", error);
  }
  if (const int error = nccl_->user_rank(communicator, &rank_); error != Nccl::kSuccess) {
    return NcclText("ncclCommUserRank", error);
  }
  if (num_ranks_ < 1 || num_ranks_ > kMaxRanks) {
    return "the communicator of an expert group has " + std::to_string(num_ranks_) + " ranks";
  }
  const CudaStatus status = OpenDeviceSide();
  return status.ok() ? "" : status.text();
}

CudaStatus Exchange::OpenDeviceSide() {
  if (stream_ == nullptr) {
    MEGAMOE_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaMalloc(&memory_, (1 + kMaxRanks) * kMaxRecordBytes));
  return {};
}

std::string Exchange::GatherBytes(const void* mine, size_t bytes, const Patience& patience,
                                  void* all) {
  char* gathered = memory_ + kMaxRecordBytes;
  if (CudaStatus status = CopyIn(memory_, mine, bytes, stream_); !status.ok()) {
    return status.text();
  }
  const int result =
      nccl_->all_gather(memory_, gathered, bytes, Nccl::kInt8, communicator_, stream_);
  if (std::string why = Await(result, patience); !why.empty()) return why;
  const CudaStatus status = CopyOut(all, gathered, num_ranks_ * bytes, stream_);
  return status.ok() ? "" : status.text();
}

// A communicator that does not block answers "in progress" until the call is on its stream.
std::string Exchange::Await(int result, const Patience& patience) {
  const std::chrono::nanoseconds deadline(patience.deadline_ns);
  const auto begin = Clock::now();
  const std::string whom =
      " waiting for the other ranks of its expert group to set up their "
      "workspaces";
  bool is_long = false;
  for (;; std::this_thread::sleep_for(kPause)) {
    if (result != Nccl::kSuccess && result != Nccl::kInProgress) {
      return NcclText("ncclAllGather", result);
    }
    if (result == Nccl::kSuccess) {
      const cudaError_t stream = cudaStreamQuery(stream_);
      if (stream == cudaSuccess) return "";
      if (stream != cudaErrorNotReady) return CudaStatus{stream, "cudaStreamQuery"}.text();
      (void)cudaGetLastError();  // that it is not ready would be the error of a later call
    }
    if (const std::string loss = patience.loss(); !loss.empty()) {
      return "rank " + std::to_string(rank_) + " gave up" + whom + ": " + loss;
    }
    const auto waited = Clock::now() - begin;
    if (waited > deadline) {
      return "rank " + std::to_string(rank_) + " gave up" + whom + ", after " + Ms(deadline) +
             "; all processes run the same program";
    }
    if (!is_long && waited > LongWait(deadline)) {
      is_long = true;
      std::fprintf(stderr, "jax_megamoe: rank %d is still%s, after %s; it gives up after %s\n",
                   rank_, whom.c_str(), Ms(waited).c_str(), Ms(deadline).c_str());
    }
    if (const int error = nccl_->async_error(communicator_, &result); error != Nccl::kSuccess) {
      return NcclText("ncclCommGetAsyncError", error);
    }
  }
}

std::string Exchange::NcclText(const char* call, int error) const {
  return std::string(call) + ": " + nccl_->error_string(error);
}

}  // namespace megamoe
