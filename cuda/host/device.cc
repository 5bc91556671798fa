#include "host/device.h"

#include <cuda_runtime_api.h>

#include <mutex>
#include <set>

#include "comm/peer_probe.h"
#include "comm/share_inputs.h"
#include "comm/wait_probe.h"
#include "host/fault.h"
#include "kernel/backward.h"
#include "kernel/backward_fp8.h"
#include "kernel/forward.h"
#include "kernel/forward_fp8.h"
#include "kernel/quantize_rows.h"
#include "plan/plan.h"
#include "shared/cuda_status.h"

namespace megamoe {
namespace {

// The kernels are built for sm_90a, which runs on this compute capability alone.
constexpr int kMajor = 9;
constexpr int kMinor = 0;

CudaStatus CurrentDevice(int* device) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaGetDevice(device));
  return {};
}

CudaStatus Describe(int device, cudaDeviceProp* properties) {
  MEGAMOE_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(properties, device));
  return {};
}

}  // namespace

std::string PrepareDevice(int device) {
  static std::mutex mutex;
  static std::set<int>* ready = new std::set<int>;  // never destroyed: calls may outlive main
  int current = 0;
  if (CudaStatus status = CurrentDevice(&current); !status.ok()) return status.text();
  if (current != device) {
    return "XLA runs device " + std::to_string(device) + " while CUDA's current device is " +
           std::to_string(current);
  }
  const std::lock_guard<std::mutex> lock(mutex);
  if (ready->count(device) > 0) return "";
  cudaDeviceProp properties;
  if (CudaStatus status = Describe(device, &properties); !status.ok()) return status.text();
  if (properties.major != kMajor || properties.minor != kMinor) {
    return "device " + std::to_string(device) + " (" + properties.name +
           ") has compute capability " + std::to_string(properties.major) + "." +
           std::to_string(properties.minor) +
           "; the kernels run on 9.0 (H100, H200, GH200) only; use backend=\"reference\"";
  }
  for (const CudaStatus& status :
       {plan::Load(), LoadForward(), LoadFp8Forward(), LoadQuantizeRows(), LoadBackward(),
        LoadFp8Backward(), LoadWaitProbe(), LoadPeerProbe(), LoadShareInputs(),
        OpenFaultChannel(device)}) {
    if (!status.ok()) return status.text();
  }
  ready->insert(device);
  return "";
}

}  // namespace megamoe
