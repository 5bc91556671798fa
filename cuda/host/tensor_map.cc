#include "host/tensor_map.h"

#include <cuda_runtime_api.h>

#include <algorithm>

namespace megamoe {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// From the driver that is loaded: the library does not link libcuda.
EncodeTiled LookUpEncode() {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                             12000, cudaEnableDefault, &result);
  return error == cudaSuccess ? reinterpret_cast<EncodeTiled>(entry) : nullptr;
}

CudaStatus FindEncode(EncodeTiled* encode) {
  static const EncodeTiled found = LookUpEncode();
  *encode = found;
  return found != nullptr ? CudaStatus{}
                          : CudaStatus{cudaErrorNotSupported, "cuTensorMapEncodeTiled"};
}

template <int kRank>
CudaStatus Encode(void* data, const cuuint64_t (&dims)[kRank],
                  const cuuint64_t (&strides_bytes)[kRank - 1], const cuuint32_t (&box)[kRank],
                  CUtensorMap* map) {
  EncodeTiled encode = nullptr;
  if (CudaStatus status = FindEncode(&encode); !status.ok()) return status;
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, kRank, data, dims, strides_bytes, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? CudaStatus{}
                                : CudaStatus{cudaErrorInvalidValue, "cuTensorMapEncodeTiled"};
}

constexpr cuuint64_t kElementBytes = 2;
constexpr cuuint32_t kBoxColumns = 64;

cuuint64_t RowBytes(const Matrix& m) { return m.columns * kElementBytes; }

}  // namespace

CudaStatus RowsMap(const Matrix& m, int box_rows, CUtensorMap* map) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides_bytes[] = {RowBytes(m)};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return Encode<2>(m.data, dims, strides_bytes, box, map);
}

CudaStatus ChunksMap(const Matrix& m, int chunks, CUtensorMap* map) {
  const cuuint64_t num_chunks = m.columns / kBoxColumns;
  const cuuint64_t dims[] = {kBoxColumns, static_cast<cuuint64_t>(m.rows), num_chunks};
  const cuuint64_t strides_bytes[] = {RowBytes(m), kBoxColumns * kElementBytes};
  const cuuint32_t box[] = {kBoxColumns, 64, static_cast<cuuint32_t>(chunks)};
  return Encode<3>(m.data, dims, strides_bytes, box, map);
}

}  // namespace megamoe
