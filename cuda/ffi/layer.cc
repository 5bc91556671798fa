#include "ffi/layer.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <string>
#include <string_view>

#include "ffi/arguments.h"
#include "ffi/common.h"
#include "host/peer_arrays.h"

namespace megamoe {

namespace ffi = xla::ffi;

namespace {

std::string Text(const int64_t* sizes, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

constexpr int64_t kMultiple = 64;  // of H and I, in bf16

ffi::Error CheckShapes(const char* pass, const TokenOperands& o, const WeightSizes& sizes) {
  const ffi::Span<const int64_t> ids = o.expert_idx.dimensions();
  const int64_t T = ids[0], K = ids[1], H = sizes.H, I = sizes.I;
  for (const ffi::Error& error :
       {CheckShape(pass, "x", o.x.dimensions(), {T, H}),
        CheckShape(pass, "expert_weight", o.expert_weight.dimensions(), {T, K})}) {
    if (error.failure()) return error;
  }
  if (H % sizes.multiple == 0 && I % sizes.multiple == 0) return ffi::Error::Success();
  return Invalid(std::string(pass) + ": H is " + std::to_string(H) + " and I " + std::to_string(I) +
                 "; both may be multiples of " + std::to_string(sizes.multiple));
}

// Those of w_gate, which the other weights go with.
ffi::ErrorOr<WeightSizes> ReadSizes(const char* pass, const LayerOperands& o) {
  const ffi::Span<const int64_t> gate = o.w_gate.dimensions();
  const int64_t E = gate[0], H = gate[1], I = gate[2];
  for (const ffi::Error& error : {CheckShape(pass, "w_up", o.w_up.dimensions(), {E, H, I}),
                                  CheckShape(pass, "w_down", o.w_down.dimensions(), {E, I, H})}) {
    if (error.failure()) return error;
  }
  return WeightSizes{E, H, I, kMultiple};
}

ffi::Error CheckLaunches(const char* pass, int64_t pass_parts, ffi::Span<const int64_t> launches) {
  for (const int64_t parts : launches) {
    if (parts < 1 || (parts & ~pass_parts) != 0) {
      return Invalid(std::string(pass) + ": attribute launches holds " + std::to_string(parts) +
                     "; a launch does some of the parts " + std::to_string(pass_parts));
    }
  }
  return ffi::Error::Success();
}

// Of a call over several ranks: whether their sums are rounded to bf16.
ffi::ErrorOr<bool> ReadBf16Sums(const ffi::Dictionary& attributes) {
  const auto dtype = attributes.get<std::string_view>("combine_dtype");
  if (dtype.has_error()) return dtype.error();
  if (*dtype == "bfloat16") return true;
  if (*dtype == "float32") return false;
  return Invalid("attribute combine_dtype is " + std::string(*dtype) +
                 "; it may be float32 or bfloat16");
}

// Of a call over several ranks: whether rows cross as codes, too.
ffi::ErrorOr<bool> ReadHasCodes(const ffi::Dictionary& attributes) {
  const auto precision = attributes.get<std::string_view>("precision");
  if (precision.has_error()) return precision.error();
  return *precision == "fp8_block";
}

// The constants of the gated unit, which jax_megamoe/activation.py has of each activation.
ffi::ErrorOr<GatedUnit> ReadUnit(const ffi::Dictionary& attributes) {
  GatedUnit unit;
  const struct {
    const char* name;
    float* place;
    float least, most;
  } constants[] = {
      {"alpha", &unit.alpha, -FLT_MAX, FLT_MAX},
      {"beta", &unit.beta, 0, FLT_MAX},
      {"limit", &unit.limit, FLT_MIN, INFINITY},
      {"offset", &unit.offset, -FLT_MAX, FLT_MAX},
  };
  for (const auto& constant : constants) {
    const auto value = attributes.get<float>(constant.name);
    if (value.has_error()) return value.error();
    if (!(*value >= constant.least && *value <= constant.most)) {
      return Invalid(std::string("attribute ") + constant.name + " is " + std::to_string(*value) +
                     "; it may be from " + std::to_string(constant.least) + " to " +
                     std::to_string(constant.most));
    }
    *constant.place = *value;
  }
  return unit;
}

// B is computed in jax_megamoe/config.py; the kernel walks a tree of at most 8 blocks.
bool IsBlockCount(int64_t num_blocks, int64_t experts) {
  return num_blocks >= 1 && num_blocks <= 8 && (num_blocks & (num_blocks - 1)) == 0 &&
         experts % num_blocks == 0;
}

// The trace is an extra last result, int32 [1 + records, 4], which most calls do not ask for.
ffi::ErrorOr<TraceBuffer> ReadTrace(ffi::RemainingRets& results, size_t i, int num_ranks) {
  if (results.size() <= i) return TraceBuffer{};
  const auto result = results.get<ffi::Buffer<ffi::S32, 2>>(i);
  if (result.has_error()) return result.error();
  const auto sizes = (*result)->dimensions();
  const int64_t others = num_ranks > 1 ? 1 + kTrafficRecords : 1;
  if (sizes[0] < others || sizes[1] * sizeof(int32_t) != sizeof(TraceRecord)) {
    return Invalid("a trace has at least " + std::to_string(others) + " rows, of 4 numbers");
  }
  return TraceBuffer{static_cast<TraceRecord*>((*result)->untyped_data()),
                     static_cast<uint32_t>(sizes[0] - others)};
}

}  // namespace

ffi::Error PrepareLayer(ffi::RemainingArgs, ffi::RemainingRets, ffi::Dictionary attributes) {
  const ffi::ErrorOr<int64_t> ranks = attributes.get<int64_t>("R");
  if (ranks.has_error()) return ranks.error();
  if (*ranks == 1) return ffi::Error::Success();
  return Invalid("attribute R is " + std::to_string(*ranks) + "; this target is that of one rank");
}

ffi::Error CheckShape(const char* pass, const char* name, ffi::Span<const int64_t> found,
                      std::initializer_list<int64_t> sizes) {
  if (std::equal(found.begin(), found.end(), sizes.begin(), sizes.end())) {
    return ffi::Error::Success();
  }
  return Invalid(std::string(pass) + ": operand " + name + " is " +
                 Text(found.begin(), found.size()) + "; it goes with " +
                 Text(sizes.begin(), sizes.size()));
}

ffi::ErrorOr<LayerCall> ReadLayerCall(const char* pass, int64_t pass_parts,
                                      const LayerOperands& operands, int num_ranks,
                                      const ffi::Dictionary& attributes) {
  const auto sizes = ReadSizes(pass, operands);
  if (sizes.has_error()) return sizes.error();
  return ReadTokenCall(pass, pass_parts, operands, *sizes, num_ranks, attributes);
}

ffi::ErrorOr<LayerCall> ReadTokenCall(const char* pass, int64_t pass_parts,
                                      const TokenOperands& operands, const WeightSizes& sizes,
                                      int num_ranks, const ffi::Dictionary& attributes) {
  const auto steps = attributes.get<ffi::Span<const int64_t>>("steps");
  const auto num_blocks = attributes.get<int64_t>("num_blocks");
  const auto pool_routes = attributes.get<int64_t>("pool_routes");
  const auto launches = attributes.get<ffi::Span<const int64_t>>("launches");
  if (steps.has_error()) return steps.error();
  if (num_blocks.has_error()) return num_blocks.error();
  if (pool_routes.has_error()) return pool_routes.error();
  if (launches.has_error()) return launches.error();
  if (ffi::Error error = CheckShapes(pass, operands, sizes); error.failure()) return error;
  if (ffi::Error error = CheckLaunches(pass, pass_parts, *launches); error.failure()) return error;
  const int64_t experts = sizes.E * num_ranks;
  if (!IsBlockCount(*num_blocks, experts)) {
    return Invalid(std::string(pass) + ": attribute num_blocks is " + std::to_string(*num_blocks) +
                   " for " + std::to_string(experts) +
                   " experts; it may be 1, 2, 4 or 8 and divides them");
  }
  const ffi::Span<const int64_t> ids = operands.expert_idx.dimensions();
  const int64_t routing[3] = {num_ranks, ids[0], ids[1]};
  const ffi::ErrorOr<PlanProblem> plan =
      ReadPlanProblem(ffi::Span<const int64_t>(routing, 3), experts, 0, *pool_routes, *steps);
  if (plan.has_error()) return plan.error();
  const ffi::ErrorOr<GatedUnit> unit = ReadUnit(attributes);
  if (unit.has_error()) return unit.error();
  LayerCall call = {};
  call.unit = *unit;
  call.plan = *plan;
  call.H = static_cast<int>(sizes.H);
  call.I = static_cast<int>(sizes.I);
  call.num_blocks = static_cast<int>(*num_blocks);
  call.pool_rows = PoolRows(*plan);
  call.expert_idx = operands.expert_idx.typed_data();
  call.expert_weight = operands.expert_weight.typed_data();
  call.launches = launches->begin();
  call.num_launches = static_cast<int64_t>(launches->size());
  if (num_ranks > 1) {
    const auto bf16_sums = ReadBf16Sums(attributes);
    const auto has_codes = ReadHasCodes(attributes);
    if (bf16_sums.has_error()) return bf16_sums.error();
    if (has_codes.has_error()) return has_codes.error();
    call.bf16_sums = *bf16_sums;
    call.has_codes = *has_codes;
  }
  return call;
}

ffi::Error ReadBiases(const char* pass, ffi::RemainingArgs& others,
                      const ffi::Dictionary& attributes, LayerCall* call) {
  const auto has_biases = attributes.get<int64_t>("biases");
  if (has_biases.has_error()) return has_biases.error();
  if (*has_biases == 0) return ffi::Error::Success();
  const struct {
    const char* name;
    int64_t columns;
    const float** place;
  } biases[kNumBiases] = {{"b_gate", call->I, &call->biases.gate},
                          {"b_up", call->I, &call->biases.up},
                          {"b_down", call->H, &call->biases.down}};
  for (size_t i = 0; i < kNumBiases; ++i) {
    const auto bias = others.get<ExpertBias>(i);
    if (bias.has_error()) return bias.error();
    const int64_t experts = call->plan.dims.experts_per_rank();
    if (ffi::Error error =
            CheckShape(pass, biases[i].name, bias->dimensions(), {experts, biases[i].columns});
        error.failure()) {
      return error;
    }
    *biases[i].place = bias->typed_data();
  }
  return ffi::Error::Success();
}

ffi::ErrorOr<int64_t> ReadPeerBytes(const ffi::Dictionary& attributes) {
  const char* const names[] = {"T", "K", "E", "R", "H"};
  int v[5];
  for (int i = 0; i < 5; ++i) {
    const auto number = attributes.get<int64_t>(names[i]);
    if (number.has_error()) return number.error();
    v[i] = static_cast<int>(*number);
  }
  const auto bf16_sums = ReadBf16Sums(attributes);
  const auto has_codes = ReadHasCodes(attributes);
  if (bf16_sums.has_error()) return bf16_sums.error();
  if (has_codes.has_error()) return has_codes.error();
  return PeerArrayBytes({{v[0], v[1], v[2], v[3]}, v[4], *bf16_sums, *has_codes});
}

void SetPeers(int32_t device, int64_t deadline_ns, const GroupCall* group, LayerCall* call) {
  const int rank = group == nullptr ? 0 : group->peers.rank;
  call->wait =
      group == nullptr ? NextCall(device, static_cast<uint64_t>(deadline_ns)) : group->wait;
  call->plan.rank = rank;
  if (group == nullptr) return;
  call->peers =
      PeerArraysOf(group->peers, {call->plan.dims, call->H, call->bf16_sums, call->has_codes});
}

ffi::ErrorOr<int64_t> ReadDeadline(const ffi::Dictionary& attributes) {
  return attributes.get<int64_t>("deadline_ns");
}

ffi::ErrorOr<int64_t> ReadKeepsGateUp(const ffi::Dictionary& attributes) {
  return attributes.get<int64_t>("keep_gate_up");
}

ffi::Error ReadLayerResults(ffi::RemainingRets& results, int first_plan, size_t trace,
                            LayerCall* call) {
  const ffi::ErrorOr<PlanArrays> arrays = ReadPlanArrays(call->plan, results, first_plan);
  if (arrays.has_error()) return arrays.error();
  const ffi::ErrorOr<TraceBuffer> buffer = ReadTrace(results, trace, call->plan.dims.R);
  if (buffer.has_error()) return buffer.error();
  call->plan_arrays = *arrays;
  call->trace = *buffer;
  return ffi::Error::Success();
}

#ifdef MEGAMOE_DELAYS
ffi::Error Poison(cudaStream_t stream, const ffi::RemainingRets& results) {
  for (size_t i = 0; i < results.size(); ++i) {
    const auto result = results.get<ffi::AnyBuffer>(i);
    if (result.has_error()) return result.error();
    const cudaError_t error =
        cudaMemsetAsync((*result)->untyped_data(), 0xff, (*result)->size_bytes(), stream);
    if (error != cudaSuccess) return FromCuda({error, "cudaMemsetAsync"});
  }
  return ffi::Error::Success();
}
#endif

}  // namespace megamoe
