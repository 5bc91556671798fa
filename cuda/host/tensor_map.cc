#include "host/tensor_map.h"

#include <cuda_runtime_api.h>

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

CUtensorMapDataType Type(Element element) {
  switch (element) {
    case Element::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case Element::kByte:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

template <int kRank>
CudaStatus Encode(const Matrix& m, const cuuint64_t (&dims)[kRank],
                  const cuuint64_t (&strides_bytes)[kRank - 1], const cuuint32_t (&box)[kRank],
                  CUtensorMap* map) {
  EncodeTiled encode = nullptr;
  if (CudaStatus status = FindEncode(&encode); !status.ok()) return status;
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, Type(m.element), kRank, m.data, dims, strides_bytes, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? CudaStatus{}
                                : CudaStatus{cudaErrorInvalidValue, "cuTensorMapEncodeTiled"};
}

constexpr cuuint64_t kBoxRowBytes = 128;

cuuint64_t ElementBytes(const Matrix& m) {
  return m.element == Element::kF32 ? 4 : m.element == Element::kByte ? 1 : 2;
}
cuuint64_t RowBytes(const Matrix& m) {
  return m.row_bytes != 0 ? m.row_bytes : m.columns * ElementBytes(m);
}
cuuint32_t BoxColumns(const Matrix& m) {
  return static_cast<cuuint32_t>(kBoxRowBytes / ElementBytes(m));
}

}  // namespace

CudaStatus RowsMap(const Matrix& m, int box_rows, CUtensorMap* map) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows)};
  const cuuint64_t strides_bytes[] = {RowBytes(m)};
  const cuuint32_t box[] = {BoxColumns(m), static_cast<cuuint32_t>(box_rows)};
  return Encode<2>(m, dims, strides_bytes, box, map);
}

CudaStatus StackedRowsMap(const Matrix& m, int64_t num_matrices, int box_rows, CUtensorMap* map) {
  const cuuint64_t dims[] = {static_cast<cuuint64_t>(m.columns), static_cast<cuuint64_t>(m.rows),
                             static_cast<cuuint64_t>(num_matrices)};
  const cuuint64_t strides_bytes[] = {RowBytes(m), m.rows * RowBytes(m)};
  const cuuint32_t box[] = {BoxColumns(m), static_cast<cuuint32_t>(box_rows), 1};
  return Encode<3>(m, dims, strides_bytes, box, map);
}

CudaStatus ChunksMap(const Matrix& m, int chunks, CUtensorMap* map) {
  const cuuint32_t columns = BoxColumns(m);
  const cuuint64_t num_chunks = m.columns / columns;
  const cuuint64_t dims[] = {columns, static_cast<cuuint64_t>(m.rows), num_chunks};
  const cuuint64_t strides_bytes[] = {RowBytes(m), kBoxRowBytes};
  const cuuint32_t box[] = {columns, 64, static_cast<cuuint32_t>(chunks)};
  return Encode<3>(m, dims, strides_bytes, box, map);
}

}  // namespace megamoe
