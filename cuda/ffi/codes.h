// The weights of precision="fp8_block" among the operands of a call.
#pragma once

#include <cstdint>
#include <string>

#include "ffi/arguments.h"
#include "ffi/layer.h"
#include "shared/fp8.h"
#include "xla/ffi/api/ffi.h"

namespace megamoe {

// e4m3fn, rank 3: XLA's binding has no buffers of this type.
using Codes = xla::ffi::AnyBuffer;
using Scales = xla::ffi::Buffer<xla::ffi::F32, 3>;

// An M x N matrix of each of E experts, in the order `order`, "natural" or "transposed". name: of
// the argument that it was made of.
inline xla::ffi::Error CheckCodes(const char* pass, const std::string& name,
                                  const std::string& order, const Codes& codes, int64_t E,
                                  int64_t M, int64_t N) {
  const std::string full_name = name + "." + order;
  if (codes.element_type() != xla::ffi::F8E4M3FN) {
    return Invalid(std::string(pass) + ": operand " + full_name + " is no float8_e4m3fn");
  }
  return CheckShape(pass, full_name.c_str(), codes.dimensions(), {E, M, N});
}

// Of the blocks of such a matrix in its natural order.
inline xla::ffi::Error CheckScales(const char* pass, const std::string& name, const Scales& scales,
                                   int64_t E, int64_t M, int64_t N) {
  const std::string full_name = name + ".scales";
  return CheckShape(pass, full_name.c_str(), scales.dimensions(),
                    {E, M / kFp8Group, N / kFp8Group});
}

// What is not of rank 3 has no sizes to begin with.
inline xla::ffi::Error CheckRank(const char* pass, const char* name, const Codes& codes) {
  const size_t rank = codes.dimensions().size();
  if (rank == 3) return xla::ffi::Error::Success();
  return Invalid(std::string(pass) + ": operand " + name + " has " + std::to_string(rank) +
                 " dimensions; it has 3");
}

}  // namespace megamoe
