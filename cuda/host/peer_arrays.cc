#include "host/peer_arrays.h"

#include <cstddef>

#include "shared/fp8.h"

namespace megamoe {
namespace {

constexpr int64_t kAlignment = 256;  // of every array, more than any access needs

// Calls take turns with these: comm/share_inputs.cuh says why.
constexpr int kRoutings = 2;

// Bytes from the beginning of a workspace. Flags come first, so that they lie apart from data.
struct Offsets {
  int64_t blocks_done, inputs_done, sums_done, dw, x, dy, x_codes, dy_codes, sums, end;
  int64_t expert_idx[kRoutings], expert_weight[kRoutings];
};

Offsets OffsetsOf(const PeerLayout& layout) {
  const RoutingDims& d = layout.dims;
  const int H = layout.H;
  const int64_t tokens = d.T;
  const int64_t slots = tokens * d.K;
  int64_t end = 0;
  const auto place = [&](int64_t bytes) {
    const int64_t at = end;
    end = (end + bytes + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  };
  Offsets o = {};
  o.blocks_done = place(sizeof(uint32_t));
  o.inputs_done = place(d.R * sizeof(uint32_t));
  o.sums_done = place(d.R * tokens * sizeof(uint32_t));
  for (int i = 0; i < kRoutings; ++i) {
    o.expert_idx[i] = place(d.R * slots * sizeof(int32_t));
    o.expert_weight[i] = place(d.R * slots * sizeof(float));
  }
  o.dw = place(slots * sizeof(float));
  o.x = place(tokens * H * 2);
  o.dy = place(tokens * H * 2);
  const int64_t code_bytes = layout.has_codes ? tokens * CodeRowBytes(H) : 0;
  o.x_codes = place(code_bytes);
  o.dy_codes = place(code_bytes);
  o.sums = place(d.R * tokens * H * (layout.bf16_sums ? 2 : 4));
  o.end = end;
  return o;
}

}  // namespace

int64_t PeerArrayBytes(const PeerLayout& layout) { return OffsetsOf(layout).end; }

PeerArrays PeerArraysOf(const Peers& peers, const PeerLayout& layout) {
  const Offsets o = OffsetsOf(layout);
  const uint32_t turn = peers.epoch % kRoutings;
  PeerArrays a = {};
  for (int r = 0; r < layout.dims.R; ++r) {
    std::byte* base = peers.base[r];
    a.x[r] = reinterpret_cast<uint4*>(base + o.x);
    a.dy[r] = reinterpret_cast<uint4*>(base + o.dy);
    a.x_codes[r] = reinterpret_cast<uint4*>(base + o.x_codes);
    a.dy_codes[r] = reinterpret_cast<uint4*>(base + o.dy_codes);
    a.expert_idx[r] = reinterpret_cast<int32_t*>(base + o.expert_idx[turn]);
    a.expert_weight[r] = reinterpret_cast<float*>(base + o.expert_weight[turn]);
    a.inputs_done[r] = reinterpret_cast<uint32_t*>(base + o.inputs_done);
    a.sums[r] = base + o.sums;
    a.dw[r] = reinterpret_cast<float*>(base + o.dw);
    a.sums_done[r] = reinterpret_cast<uint32_t*>(base + o.sums_done);
  }
  a.blocks_done = reinterpret_cast<uint32_t*>(peers.base[peers.rank] + o.blocks_done);
  a.epoch = peers.epoch;
  a.bf16_sums = layout.bf16_sums;
  return a;
}

}  // namespace megamoe
