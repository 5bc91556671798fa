// The ranks of an expert group on one GPU, each with a stream and its share of the multiprocessors:
// one_gpu IN OUT, see tests/ranks/calls.h. All of the protocol is as over NVLink but for the way.
//
// Header::seed: of delays in every role, 0 for none (cuda/pipeline/delay.cuh).
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <vector>

#include "calls.h"
#include "comm/share_inputs.h"
#include "kernel/backward.h"
#include "kernel/backward_fp8.h"
#include "kernel/forward.h"
#include "kernel/forward_fp8.h"
#include "kernel/quantize_rows.h"
#include "plan/plan.h"

namespace {

constexpr uint64_t kDeadlineMs = 10'000;

void Check(const megamoe::CudaStatus& status) {
  if (!status.ok()) ranks::Fail(status.text().c_str());
}
void Check(cudaError_t error) {
  if (error != cudaSuccess) ranks::Fail(cudaGetErrorString(error));
}

class OneGpu final : public ranks::Machine {
 public:
  explicit OneGpu(const ranks::Header& header)
      : ranks_(header.R), deadline_ms_(header.deadline == 0 ? kDeadlineMs : header.deadline) {
    for (const megamoe::CudaStatus& status :
         {megamoe::plan::Load(), megamoe::LoadForward(), megamoe::LoadFp8Forward(),
          megamoe::LoadQuantizeRows(), megamoe::LoadBackward(), megamoe::LoadFp8Backward(),
          megamoe::LoadShareInputs(), megamoe::SetForwardDelays(header.seed),
          megamoe::SetFp8ForwardDelays(header.seed), megamoe::SetBackwardDelays(header.seed),
          megamoe::SetFp8BackwardDelays(header.seed)}) {
      Check(status);
    }
    for (Rank& rank : ranks_) {
      Check(cudaStreamCreateWithFlags(&rank.stream, cudaStreamNonBlocking));
      Check(cudaHostAlloc(reinterpret_cast<void**>(&rank.page), sizeof(megamoe::FaultPage), 0));
      std::memset(rank.page, 0, sizeof(megamoe::FaultPage));
      rank.failed_epoch = static_cast<uint32_t*>(Allocate(sizeof(uint32_t)));
      Check(cudaMemset(rank.failed_epoch, 0, sizeof(uint32_t)));
    }
  }

  void* Allocate(int64_t bytes) override {
    void* memory = nullptr;
    Check(cudaMalloc(&memory, bytes + 1));  // of no bytes too
    Check(cudaMemset(memory, 0xff, bytes));
    return memory;
  }
  void CopyIn(void* to, const void* from, int64_t bytes) override {
    Check(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
  }
  void CopyOut(void* to, const void* from, int64_t bytes) override {
    Check(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
  }
  megamoe::WaitContext Begin(int rank, uint32_t epoch,
                             const std::vector<ranks::PlanPointers>&) override {
    current_ = rank;
    const uint64_t deadline_ns = deadline_ms_ * 1'000'000;
    return {ranks_[rank].page, ranks_[rank].failed_epoch, deadline_ns, epoch, rank, epoch - 1};
  }
  cudaStream_t Stream() override { return ranks_[current_].stream; }
  void EnqueueStart(int num_kernels, const std::function<void()>& enqueue) override {
    const cudaStream_t stream = ranks_[0].stream;
    cudaGraph_t graph;
    Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed));
    enqueue();
    Check(cudaStreamEndCapture(stream, &graph));
    CutBehind(num_kernels, graph);
    // Before a kernel waits: to make it may wait for a GPU whose kernels wait.
    cudaGraphExec_t start;
    Check(cudaGraphInstantiate(&start, graph, 0));
    Check(cudaGraphLaunch(start, stream));
  }
  void Run() override { Check(cudaDeviceSynchronize()); }
  uint32_t FailedEpoch(int rank) override {
    uint32_t epoch = 0;
    CopyOut(&epoch, ranks_[rank].failed_epoch, sizeof(epoch));
    const megamoe::FaultRecord& record = ranks_[rank].page->record;
    if (epoch != 0) {
      std::fprintf(stderr, "rank %d waited for %s of rank %d in call %u\n", rank,
                   megamoe::kPhaseNames[static_cast<int>(record.phase)], record.peer, epoch);
    }
    return epoch;
  }
  const megamoe::FaultRecord& Record(int rank) override { return ranks_[rank].page->record; }

 private:
  struct Rank {
    cudaStream_t stream;
    megamoe::FaultPage* page;
    uint32_t* failed_epoch;
  };

  // A call is the share, the count of the routes and, for each pass, their places and the kernel,
  // one behind another.
  static void CutBehind(int num_kernels, cudaGraph_t graph) {
    const int num_kept = num_kernels == 0 ? 1 : 2 + 2 * num_kernels;
    std::vector<cudaGraphNode_t> nodes(1);
    size_t count = 1;
    Check(cudaGraphGetRootNodes(graph, nodes.data(), &count));
    while (count == 1) {
      cudaGraphNode_t next = nullptr;
      cudaGraphEdgeData edge;
      Check(cudaGraphNodeGetDependentNodes(nodes.back(), &next, &edge, &count));
      if (count == 1) nodes.push_back(next);
    }
    for (int i = 0; i < static_cast<int>(nodes.size()); ++i) {
      cudaGraphNodeType type;
      Check(cudaGraphNodeGetType(nodes[i], &type));
      if (i < num_kept && type != cudaGraphNodeTypeKernel) ranks::Fail("a call has fewer kernels");
      if (i >= num_kept) Check(cudaGraphDestroyNode(nodes[i]));
    }
  }

  std::vector<Rank> ranks_;
  const uint64_t deadline_ms_;
  int current_ = 0;
};

ranks::Machine& Start(const ranks::Header& header) { return *new OneGpu(header); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) ranks::Fail("usage: one_gpu IN OUT");
  ranks::RunFile(argv[1], argv[2], Start);
}
